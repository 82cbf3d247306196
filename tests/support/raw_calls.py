"""Calls of RawKV, and of what PD says of regions, that tests need and the product does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.region_errors import check_answer
from tikv_br.cluster.regions import RegionColumns
from tikv_br.cluster.store import StoreClient
from tikv_br.formats import columns


@dataclass(frozen=True, slots=True)
class CompareAndSwapResult:
    """Result of a compare-and-swap."""

    succeeded: bool
    previous: bytes | None
    """The value before; None when there was none."""


def compare_and_swap(raw: RawClient, key: bytes, previous: bytes | None, value: bytes) -> CompareAndSwapResult:
    """Write the value if the key's is ``previous``; None means that there must be none."""

    def send(store: StoreClient, context: kvrpcpb_pb2.Context, rpc_key: bytes) -> CompareAndSwapResult:
        request = kvrpcpb_pb2.RawCASRequest(
            context=context,
            key=rpc_key,
            value=value,
            previous_not_exist=previous is None,
            previous_value=previous or b"",
        )
        answer = store.call(store.kv.RawCompareAndSwap, request)
        check_answer(answer)
        return CompareAndSwapResult(answer.succeed, None if answer.previous_not_exist else answer.previous_value)

    return raw._on_key(key, send, "RawCompareAndSwap")


def put_with_ttls(raw: RawClient, rows: Iterable[tuple[bytes, bytes, int]]) -> None:
    """Write pairs with a TTL each, in seconds; 0 = none. Keys differ."""
    ordered, now = sorted(rows), raw.now()
    keys, values = columns.from_list([row[0] for row in ordered]), columns.from_list([row[1] for row in ordered])
    expire_ts = np.array([row[2] and now + row[2] for row in ordered], np.uint64)
    raw.column_writer().put(keys, values, expire_ts)


def starts_of(regions: RegionColumns) -> list[bytes]:
    """The start keys of regions."""
    return [regions.start(index) for index in range(len(regions))]
