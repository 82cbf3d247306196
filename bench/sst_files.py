"""SST writer and reader beside RocksDB's own (rocksdict), in memory and on one core."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import rocksdict

from bench.dataset import KEY_SIZE, Dataset
from bench.harness import Figure, Goal, Scale, Work, cpu_seconds, rates
from bench.rivals import pairs, put_all, sst_options
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.rows import to_storage
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.writer import SstOptions, SstWriter

BENCH_WRITE, BENCH_READ = "SST writer", "SST reader"
VALUE_SIZES = (100, 1024)
BATCH_ROWS = 10_240
METHODS = (Compression.ZSTD, Compression.LZ4)


def figures(scale: Scale) -> Iterator[Figure]:
    """MB/s of user bytes, for each size and compression, first of writing, then of reading."""
    for size in VALUE_SIZES:
        dataset = Dataset(scale.data_bytes // (size + KEY_SIZE), size, scale.data)
        rows = to_storage(dataset.records(), KeyCodec(ApiVersion.V2))
        for compression in METHODS:
            yield from _figures(dataset, rows, compression, scale)


def _figures(dataset: Dataset, rows: pa.RecordBatch, compression: Compression, scale: Scale) -> Iterator[Figure]:
    case, megabytes = f"{dataset.value_size} B, {compression.label}", dataset.user_bytes / 1e6
    python_rows = list(pairs(rows))  # not counted: whoever puts key by key may have them so
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers: dict[str, Work] = {
            "tikv-br": cpu_seconds(lambda: write(rows, compression)),
            "rocksdict": cpu_seconds(lambda: put_all(folder / "theirs.sst", python_rows, sst_options(compression))),
        }
        yield from rates(BENCH_WRITE, case, megabytes, "MB/s per core", writers, scale.rounds)
        table = write(rows, compression)
        database = _ingested(folder, table)
        readers: dict[str, Work] = {
            "tikv-br": cpu_seconds(lambda: _drain(SstReader(MemorySource(table)).batches())),
            "rocksdict, iterated": cpu_seconds(lambda: _drain(database.items())),
            "rocksdict, into Arrow": cpu_seconds(lambda: _into_arrow(database)),
        }
        goals = {"rocksdict, into Arrow": Goal("ratio", at_least=8)} if dataset.value_size == 100 else {}
        try:
            yield from rates(BENCH_READ, case, megabytes, "MB/s per core", readers, scale.rounds, goals)
        finally:
            database.close()


def write(rows: pa.RecordBatch, compression: Compression) -> bytes:
    """A table of these rows, appended in batches of a scan's page."""
    pieces: list[bytes] = []
    writer = SstWriter(pieces.append, SstOptions(compression))
    for start in range(0, rows.num_rows, BATCH_ROWS):
        writer.append(rows.slice(start, BATCH_ROWS))
    writer.finish()
    return b"".join(pieces)


def _ingested(folder: Path, table: bytes) -> rocksdict.Rdict:
    """A database that holds one table and nothing else."""
    path = folder / "ours.sst"
    path.write_bytes(table)
    database = rocksdict.Rdict(str(folder / "database"), rocksdict.Options(raw_mode=True))
    database.ingest_external_file([str(path)])
    return database


def _drain(rows: Iterable[object]) -> None:
    collections.deque(rows, maxlen=0)


def _into_arrow(database: rocksdict.Rdict) -> pa.RecordBatch:
    keys, values = zip(*database.items(), strict=True)
    return columns.storage_rows(columns.from_list(keys), columns.from_list(values))
