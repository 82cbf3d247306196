"""The kernels between wire, records and RocksDB beside memcpy of what they produce, on a page that fits a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from bench.dataset import Dataset, Pages
from bench.harness import Figure, Scale, Work, cpu_seconds, rates
from tikv_br.dataflow.convert import Conversion
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import parse
from tikv_br.formats.rows import from_storage, to_storage

BENCH = "codec kernels"
VALUE_SIZES = (100, 1024)
PAGE_BYTES = 1 << 20


def figures(scale: Scale) -> Iterator[Figure]:
    """MB/s of user bytes for each kernel; its ratio to memcpy is the part of the memory's speed that it reaches."""
    for size in VALUE_SIZES:
        dataset = Dataset(PAGE_BYTES // (size + 16), size)
        repeats = max(scale.data_bytes // PAGE_BYTES, 1)
        subjects = {name: _repeated(work, repeats) for name, work in works(dataset).items()}
        megabytes = dataset.user_bytes * repeats / 1e6
        yield from rates(BENCH, f"{size} B", megabytes, "MB/s per core", subjects, scale.rounds)


def works(dataset: Dataset) -> dict[str, Callable[[], object]]:
    """Measured kernels, by name."""
    records, v2 = dataset.records(), KeyCodec(ApiVersion.V2)
    stored, response = to_storage(records, v2), Pages(dataset).page(0, dataset.rows)
    page = parse(response)
    if page is None:
        raise ValueError("our own page is none")
    converter = Conversion(ApiVersion.V1, ApiVersion.V2, ts=1).of(KeyRange(b"", b""))
    source, target = _bytes(stored), np.empty(dataset.user_bytes, np.uint8)
    return {
        "memcpy": lambda: np.copyto(target, source[: len(target)]),
        "scan page to Arrow": lambda: parse(response),
        "checksum": lambda: checksum(records["key"], records["value"]),
        "page to records, with sums": lambda: converter.convert_page(page),
        "records to V2": lambda: to_storage(records, v2),
        "records from V2": lambda: from_storage(stored, v2),
    }


def _bytes(rows: pa.RecordBatch) -> columns.Bytes:
    return np.concatenate([columns.view(column)[1] for column in rows.columns])


def _repeated(action: Callable[[], object], times: int) -> Work:
    def repeat() -> None:
        for _ in range(times):
            action()

    return cpu_seconds(repeat)
