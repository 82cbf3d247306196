"""Options of backups that no cluster is needed for."""

from __future__ import annotations

from typing import Any

from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.storage.url import StorageLocation


def options(**changes: Any) -> BackupOptions:  # noqa: ANN401 - any field
    """Return options that differ from the defaults."""
    return BackupOptions(
        **{"cluster": ClusterConfig(("127.0.0.1:1",)), "storage": StorageLocation("local", "/backup"), **changes}
    )
