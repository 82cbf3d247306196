"""The Spark source of backups, called as Spark's workers call it, on backups that the Go tool made of real clusters."""

from __future__ import annotations

import io
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pyspark.sql import datasource as api

from tikv_br.datasource import TikvBackupDataSource
from tikv_br.errors import BackupDamaged, BackupNotFound, UsageError

Rows = dict[bytes, tuple[bytes, int]]


def expected(folder: Path) -> Rows:
    """Values and expiries of the rows that real stores have shown and that are alive now, by user key."""
    with (folder / "expected.jsonl.zst").open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        rows = [json.loads(line) for line in io.TextIOWrapper(plain, "utf-8")]
    skipped = 4 if any("ts" in row for row in rows) else 0
    return {
        bytes.fromhex(row["k"])[skipped:]: (bytes.fromhex(row["v"]), row["e"])
        for row in rows
        if not row["e"] or row["e"] > time.time()
    }


def read(options: dict[str, str], *filters: api.Filter) -> tuple[Rows, int]:
    """The rows by user key, and the number of partitions; reader and partitions travel by pickle, as in Spark."""
    source = TikvBackupDataSource({"ttl": "true", **options})
    reader: Any = source.reader(source.schema())
    if filters:
        assert list(reader.pushFilters(list(filters))) == []
    partitions = reader.partitions()
    copies = [(pickle.loads(pickle.dumps(reader)), pickle.loads(pickle.dumps(each))) for each in partitions]
    rows = [row for copy, each in copies for batch in copy.read(each) for row in batch.to_pylist()]
    found = {row["key"]: (row["value"], row["expire_ts"]) for row in rows}
    assert len(found) == len(rows), "keys came twice"
    return found, len(partitions)


@pytest.mark.parametrize("name", ["v1", "v1_lz4", "v1_to_v2", "v1ttl", "v2", "v2_3stores", "v2_ks4242_rpc"])
def test_all_live_rows_once(golden: Path, name: str) -> None:
    """For each API version, compression and keyspace, a partition per file."""
    folder = golden / "backups" / name
    known = expected(folder if (folder / "expected.jsonl.zst").exists() else golden / "backups" / "v1")
    found, partitions = read({"path": str(folder / "data")})
    assert found == known
    assert partitions == len(list((folder / "data").rglob("*.sst")))


@pytest.mark.parametrize("name", ["v1ttl", "v2"])
def test_filters_and_options_select_keys(golden: Path, name: str) -> None:
    """Only files with wanted keys are partitions, and the rows are those in the range, neither more nor less."""
    folder = golden / "backups" / name
    known = expected(folder)
    keys = sorted(known)
    first, last = keys[len(keys) // 3], keys[len(keys) // 3 + 50]
    wanted = {key: row for key, row in known.items() if first <= key < last}
    place = {"path": str(folder / "data")}
    everything = read(place)[1]
    for found, partitions in (
        read({**place, "start": first.hex(), "end": last.hex(), "key_format": "hex"}),
        read({**place, "pushdown": "true"}, api.GreaterThanOrEqual(("key",), first), api.LessThan(("key",), last)),
    ):
        assert found == wanted
        assert partitions < everything
    points = {key: known[key] for key in (first, keys[-1])}
    assert read({**place, "pushdown": "true"}, api.In(("key",), (*points, b"\1no such key")))[0] == points
    assert read({**place, "pushdown": "true"}, api.LessThan(("key",), b"")) == ({}, 0)


def test_bad_backups_and_keyspaces(golden: Path, copied: Path, tmp_path: Path) -> None:
    """Refused when the source is planned, but for damage within files, which is found when they are read."""
    with pytest.raises(BackupNotFound) as missing:
        read({"path": str(tmp_path / "nowhere")})
    assert missing.value.__notes__
    with pytest.raises(UsageError, match="does not have keyspace 5"):
        read({"path": str(copied), "keyspace": "5"})
    with pytest.raises(UsageError, match="option keyspace"):
        read({"path": str(golden / "backups" / "v1" / "data"), "keyspace": "5"})
    with pytest.raises(UsageError, match="'orders'"):
        read({"path": str(copied), "keyspace": "orders"})
    victim = max(copied.rglob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)
    with pytest.raises(BackupDamaged, match=victim.name):
        read({"path": str(copied)})
