"""An etcd in memory, for tests of what is decided by its transactions."""

from __future__ import annotations

from collections.abc import Iterable

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import CREATED, Compare, Delete, Get, KeyValue, Listing, Operation, Put, TxnResult


class MemoryEtcd(Etcd):
    """One that always answers, to one thread."""

    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.revision = 1

    def get(self, key: str) -> KeyValue | None:
        """See `Etcd`."""
        return self.items.get(key)

    def range(self, prefix: str) -> Listing:
        """See `Etcd`."""
        return Listing(tuple(self.items[key] for key in self._chosen(prefix, prefix=True)), self.revision)

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """See `Etcd`."""
        return self.transact([], [Put(key, value, lease)]).revision

    def delete(self, key: str, *, prefix: bool = False) -> int:
        """See `Etcd`."""
        before = len(self.items)
        self.transact([], [Delete(key, prefix)])
        return before - len(self.items)

    def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
        *,
        repeatable: bool = False,
    ) -> TxnResult:
        """See `Etcd`."""
        succeeded = all(map(self._holds, compares))
        self.revision += 1
        listings = []
        for operation in then if succeeded else otherwise:
            match operation:
                case Get(key, prefix):
                    found = tuple(self.items[each] for each in self._chosen(key, prefix=prefix))
                    listings.append(Listing(found, self.revision))
                case Put(key, value, lease):
                    created = self.items[key].create_revision if key in self.items else self.revision
                    self.items[key] = KeyValue(key, value, created, self.revision, lease)
                case Delete(key, prefix):
                    for each in self._chosen(key, prefix=prefix):
                        del self.items[each]
        return TxnResult(succeeded, self.revision, tuple(listings))

    def _holds(self, compare: Compare) -> bool:
        keys = self._chosen(compare.key, prefix=True) if compare.prefix else [compare.key]
        found = [self.items.get(key) for key in keys]
        return all(compare.revision == _revision(compare, item) for item in found)

    def _chosen(self, key: str, *, prefix: bool) -> list[str]:
        return sorted(each for each in self.items if each == key or (prefix and each.startswith(key)))


def _revision(compare: Compare, item: KeyValue | None) -> int:
    if item is None:
        return 0
    return item.create_revision if compare.target == CREATED else item.mod_revision
