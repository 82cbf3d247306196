"""Requests of a backup of transactions: what must never be sent, on playgrounds of both API versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.live_cluster import live_cluster
from tests.support.live_txns import Txns
from tikv_br.cluster import store
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, DangerousRequest
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode


def test_a_bound_of_raw_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup of transactions over it is refused, and beside it is answered. Without the guard the store dies."""
    with live_cluster(tmp_path, ApiVersion.V1, stores=1) as live:
        txns = Txns(live, b"")
        txns.commit(txns.prewrite(b"a", b"s"), b"a", b"s")
        live.split(b"raw-5")
        client = live.cluster.store(1)

        def backup(start: bytes, end: bytes) -> list[brpb_pb2.BackupResponse]:
            request = brpb_pb2.BackupRequest(
                cluster_id=live.cluster.cluster_id,
                start_key=start,
                end_key=end,
                end_version=txns.ts(),
                storage_backend=brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(tmp_path))),
            )
            first, last = (encode(key) if key else b"" for key in (start, end))
            return list(client.backup(request, live.cluster.pd.scan_regions(first, last)))

        with pytest.raises(ClusterUnfit, match=r'the bound "raw-5" .* of region'):
            backup(b"", b"")
        with pytest.raises(DangerousRequest, match="empty range"):
            backup(b"a", b"a")
        (answer,) = backup(b"a", b"b")
        assert {file.cf for file in answer.files} == {"write"}
        live.assert_innocent()
        monkeypatch.setattr(store, "check_backup", lambda *_request: None)
        for number, ends in enumerate([(b"", b""), (b"a", b"a")], 1):
            with pytest.raises(ClusterUnreachable):
                backup(*ends)
            assert len(live.fatal_requests()) == number
        live.pardon()
