"""A partition of sorted rows: repeated keys, bad rows and expiries, over the borders of batches; and the entries of all partitions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.integration.backup.reading import rocksdb_rows
from tikv_br.backupset.coverage import require_coverage
from tikv_br.bulk_load.partition import PartitionJob, PartitionResult, ledger_entries, write_partition
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.url import parse
from tikv_br.tasks.inputs import Input
from tikv_br.tasks.task import TaskContext

NOW = 1_700_000_000
Row = tuple[bytes | None, bytes | None, int, str | None]


def batch_of(*rows: Row) -> pa.RecordBatch:
    """A batch as Spark makes it."""
    keys, values, ttls, problems = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(keys, pa.large_binary()),
            pa.array(values, pa.large_binary()),
            pa.array(ttls, pa.int64()),
            pa.array(problems, pa.large_string()),
        ],
        names=["key", "value", "ttl", "problem"],
    )


def run(folder: Path, version: ApiVersion, *batches: pa.RecordBatch, dry_run: bool = False) -> PartitionResult:
    """Write one partition into a folder."""
    output = BackupOptions(ClusterConfig(("nowhere:1",)), parse(f"local://{folder}"))
    span = KeyCodec(version).rpc_range()
    job = PartitionJob(output, Conversion(version, version), span, NOW, dry_run=dry_run)
    return write_partition(job, iter(batches), TaskContext(0, 0, lambda _message: None))


BATCHES = (
    batch_of((None, None, 0, "null key"), (None, None, 0, "null value"), (b"a", b"1", 0, None)),
    batch_of((b"a", b"2", 0, None), (b"b", b"3", 0, None), (b"b", b"4", 0, None), (b"b", b"5", 0, None)),
    batch_of((None, None, 0, "null key")),
    batch_of((b"c", b"6", 0, None)),
)


def test_first_row_of_each_key_is_written(tmp_path: Path) -> None:
    """RocksDB reads the first row of each key; the others are counted, also where two batches meet."""
    found = run(tmp_path / "backup", ApiVersion.V1, *BATCHES)
    assert rocksdb_rows(tmp_path / "backup", tmp_path) == {b"za": b"1", b"zb": b"3", b"zc": b"6"}
    assert (found.duplicates, found.duplicate_keys) == (3, (b"a", b"b"))
    assert found.problems == {"null key": 2, "null value": 1}
    assert (found.first_key, found.last_key, found.sample) == (b"a", b"c", (b"a", b"b", b"c"))
    assert (found.rows.total_kvs, found.rows.total_bytes) == (3, 6)


def test_dry_run_counts_the_same_and_writes_nothing(tmp_path: Path) -> None:
    """The folder is not even made."""
    written = run(tmp_path / "backup", ApiVersion.V1, *BATCHES)
    counted = run(tmp_path / "other", ApiVersion.V1, *BATCHES, dry_run=True)
    assert (counted.rows, counted.duplicates, counted.sample) == (written.rows, written.duplicates, written.sample)
    assert not counted.files
    assert not (tmp_path / "other").exists()


def test_expiry_counts_from_now(tmp_path: Path) -> None:
    """A TTL of 60 s is in the file as eight bytes after the value, V1TTL's form."""
    run(tmp_path / "backup", ApiVersion.V1TTL, batch_of((b"a", b"v", 60, None), (b"b", b"v", 0, None)))
    rows = rocksdb_rows(tmp_path / "backup", tmp_path)
    assert rows == {b"za": b"v" + (NOW + 60).to_bytes(8, "big"), b"zb": b"v" + bytes(8)}


def test_entries_of_partitions_cover_the_range(tmp_path: Path) -> None:
    """From the first key to the last one, without gaps, in whatever order the partitions came; empty ones are left out."""
    parts = [
        run(tmp_path / "a", ApiVersion.V2, batch_of((b"m", b"1", 0, None), (b"n", b"2", 0, None))),
        run(tmp_path / "b", ApiVersion.V2),
        run(tmp_path / "c", ApiVersion.V2, batch_of((b"c", b"3", 0, None))),
    ]
    codec = KeyCodec(ApiVersion.V2)
    entries = ledger_entries(codec, parts, "run")
    assert [(entry.start, entry.end) for entry in entries] == [
        (codec.rpc_key(b"c"), codec.rpc_key(b"m")),
        (codec.rpc_key(b"m"), codec.rpc_key(b"n\0")),
    ]
    require_coverage([KeyRange(entries[0].start, entries[-1].end)], [entry.interval for entry in entries])
    for entry in entries:
        assert (entry.files[0].start_key, entry.files[-1].end_key) == (entry.start, entry.end)
    assert sum((entry.source for entry in entries), Checksum()).total_kvs == 3


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("/x/a.parquet", "", "parquet"),
        ("s3a://b/x/*.csv.gz", "", "csv"),
        ("/x/a.jsonl", "", "json"),
        ("/x/a.csv", "jsonl", "json"),
        ("/x/table", "delta", "delta"),
    ],
)
def test_format(path: str, name: str, expected: str) -> None:
    """By the option, else by the last suffix that is a format."""
    assert Input(path, "k", "v", format=name).spark_format == expected


def test_unknown_format() -> None:
    """A folder without a suffix needs the option."""
    with pytest.raises(UsageError, match="format of the input /x/table is unknown"):
        _ = Input("/x/table", "k", "v").spark_format
