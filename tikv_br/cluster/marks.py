"""Marks of unfinished work in a cluster, in PD's etcd, by which a later run knows what is its own.

A checkpoint or a ledger lies where others may write. What it says of rows in a cluster counts only if the cluster has its mark
(docs/adr/0027-files-describe.md). Keys, after ``/tikv-br/CLUSTER-ID/``::

    mark/restore/ID    Mark    from before a restore's first change until its checkpoint is deleted
    mark/drill/ID      Mark    from before a drill's first row until its rows are deleted
"""

from __future__ import annotations

import hmac
import logging
import secrets

from msgspec import Struct

from tikv_br import records
from tikv_br.cluster.etcd import Etcd
from tikv_br.errors import BackupDamaged, BackupUnsupported
from tikv_br.formats.keys.ranges import KeyRange

log = logging.getLogger(__name__)


def new_secret() -> str:
    return secrets.token_hex(16)


class Mark(Struct, frozen=True):
    """What unfinished work owns in a cluster."""

    secret: str
    """Random; the work's checkpoint or ledger repeats it."""
    ranges: tuple[KeyRange, ...]
    """RPC ranges that held no key before the work; it may have written there."""
    restamp_ts: int = 0
    """The timestamp of the rows that a restore ingests; 0 = their own."""

    def matches(self, secret: str) -> bool:
        """Return whether a checkpoint or ledger with this secret belongs to the mark."""
        return bool(secret) and hmac.compare_digest(self.secret.encode(), secret.encode())


class Marks:
    """The marks of one kind of work, ``restore`` or ``drill``, in one cluster. Raises `EtcdError`."""

    def __init__(self, etcd: Etcd, cluster_id: int, kind: str) -> None:
        self._etcd, self._prefix = etcd, f"/tikv-br/{cluster_id}/mark/{kind}/"

    def read(self, work_id: str) -> Mark | None:
        """The mark of a work; None if there is none, or none that can be read."""
        item = self._etcd.get(self._prefix + work_id)
        if item is None:
            return None
        try:
            return records.load(Mark, item.value, item.key)
        except (BackupDamaged, BackupUnsupported) as error:
            log.warning("etcd: a mark cannot be read: %s", error.message)
            return None

    def save(self, work_id: str, mark: Mark) -> None:
        self._etcd.put(self._prefix + work_id, records.dump(mark))

    def remove(self, work_id: str) -> None:
        """Remove the mark; there need be none."""
        self._etcd.delete(self._prefix + work_id)
