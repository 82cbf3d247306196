"""A prune that kills itself: ``python -m tests.integration.killed_prune STEP < URL`` dies right before change number STEP."""

from __future__ import annotations

import os
import signal
import sys

from tests.support.faulty_store import FaultyStore
from tikv_br.backupset.index import Index
from tikv_br.backupset.prune import Policy, execute, plan
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


class DeadlyStore(FaultyStore):
    """Counts changes, over all stores of the process, and kills the process instead of making the last one."""

    left = 0

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, "")

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Count and pass on."""
        self._count()
        return super().put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Count and pass on."""
        self._count()
        return super().put_if_absent(name, data)

    def delete(self, name: str) -> None:
        """Count and pass on."""
        self._count()
        super().delete(name)

    @classmethod
    def _count(cls) -> None:
        cls.left -= 1
        if cls.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyIndex(Index):
    """An index all of whose stores count."""

    def store_of(self, path: str) -> ObjectStore:
        """A store that counts."""
        return DeadlyStore(super().store_of(path))


if __name__ == "__main__":
    DeadlyStore.left = int(sys.argv[1])
    index = DeadlyIndex(DeadlyStore(open_store(parse(sys.stdin.read().strip()))))
    execute(index, plan(index, Policy(last=1)))
