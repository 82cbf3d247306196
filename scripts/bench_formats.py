"""Measure the codecs of `formats` on one core: rows a second, the best of several runs on batches that fit a cache.

Run it as ``.venv/bin/python scripts/bench_formats.py``. The checksum stands beside fastcrc called once a row, the parse
of scan pages beside protobuf.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
from fastcrc import crc64

from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.loadgen import generate
from tikv_br.formats.rawscan import parse
from tikv_br.formats.rows import from_storage, live, to_storage

ROWS = 16384
RUNS = 15
SIZES = (0, 16, 100, 1024)


def seconds(work: Callable[[], object]) -> float:
    """The shortest of several runs, after one that warms up."""
    work()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def works(value_size: int) -> dict[str, Callable[[], object]]:
    """Measured functions, by name, on 16-byte keys with values of this size."""
    [made] = generate(ROWS, value_size, batch_rows=ROWS)
    batch = columns.records(made["key"], made["value"], ts=np.ones(ROWS, np.uint64))
    pairs = list(zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True))
    kvs = [kvrpcpb_pb2.KvPair(key=key, value=value) for key, value in pairs]
    page: bytes = kvrpcpb_pb2.RawScanResponse(kvs=kvs).SerializeToString()
    found: dict[str, Callable[[], object]] = {}
    for api_version in ApiVersion:
        codec = KeyCodec(api_version)
        found[f"to storage, {api_version.label}"] = partial(to_storage, batch, codec)
        found[f"from storage, {api_version.label}"] = partial(from_storage, to_storage(batch, codec), codec)
    found["live rows"] = lambda: live(batch, 1)
    found["checksum"] = lambda: checksum(batch["key"], batch["value"])
    found["checksum, fastcrc a row"] = lambda: crc_by_row(pairs)
    found["scan page"] = lambda: parse(page)
    found["scan page, protobuf"] = lambda: by_protobuf(page)
    found["generate"] = lambda: list(generate(ROWS, value_size, batch_rows=ROWS))
    return found


def crc_by_row(pairs: list[tuple[bytes, bytes]]) -> int:
    """The checksum as it is defined."""
    total = 0
    for key, value in pairs:
        total ^= crc64.xz(key + value)
    return total


def by_protobuf(page: bytes) -> tuple[pa.Array, pa.Array]:
    """The page by way of a Python object for each pair."""
    kvs = kvrpcpb_pb2.RawScanResponse.FromString(page).kvs
    return columns.from_list([pair.key for pair in kvs]), columns.from_list([pair.value for pair in kvs])


def main() -> None:
    """Print a table: million rows a second, by size of value."""
    tables = [works(size) for size in SIZES]
    print(f"{'million rows/s, values of':28}" + "".join(f"{size:>8} B" for size in SIZES))
    for name in tables[0]:
        print(f"{name:28}" + "".join(f"{ROWS / seconds(table[name]) / 1e6:10.1f}" for table in tables))


if __name__ == "__main__":
    main()
