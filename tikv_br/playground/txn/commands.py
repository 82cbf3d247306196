"""What all commands of transactions share: the checks before them, and how they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.playground.encoding import memcomparable
from tikv_br.playground.engine import Change
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import TXN_MODE, RequestChecks, check_within
from tikv_br.playground.txn.mvcc import MvccReader
from tikv_br.playground.txn.state import TxnState


class TxnCommands:
    """Commands of one store. Each raises `RequestFault` or `RegionFault` if it is refused."""

    def __init__(self, node: StoreNode, checks: RequestChecks, state: TxnState) -> None:
        self._node = node
        self._checks = checks
        self._state = state
        self._reader = MvccReader(node.engine)

    def _region_of_keys(self, context: kv.Context, command: str, keys: Sequence[bytes]) -> Region:
        """Check a request for keys, which must be in its region."""
        self._checks.keys(context, command, keys, TXN_MODE)
        region = self._checks.region(context, read=True)
        check_within(region, map(memcomparable, keys))
        return region

    def _region_of_range(self, context: kv.Context, command: str, start: bytes, end: bytes) -> Region:
        """Check a request for a range, of which a region answers its part; stores check the mode of the encoded bounds."""
        self._checks.ranges(context, command, [(memcomparable(start), memcomparable(end) if end else None)], TXN_MODE)
        return self._checks.region(context, read=True)

    @contextmanager
    def _writing(self, region: Region) -> Iterator[list[Change]]:
        """Hold the latch; at the end, unless the block raises, apply the changes that it has added to the list."""
        changes: list[Change] = []
        with self._state.latch:
            yield changes
            if changes:
                self._node.engine.apply(changes)
                self._state.latch.notify_all()
        self._node.sizes.written(region.id, sum(len(key) + len(value or b"") for _, key, value in changes))
