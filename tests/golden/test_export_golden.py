"""Exports of backups that the Go TiKV-BR made, read by others' readers, against the rows recorded from the real servers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from tests.integration.backup.reading import golden_rows
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import UsageError
from tikv_br.export.run import ExportOptions, ExportSummary, export
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import parse_key
from tikv_br.storage.url import parse

NAMES = ("v1", "v1_lz4", "v1_to_v2", "v1ttl", "v1ttl_to_v2", "v2", "v2_ks4242_rpc", "v2_3stores", "v2_ranged")


def exported(folder: Path, place: Path, **more: Any) -> ExportSummary:  # noqa: ANN401 - any option
    """Export a backup on two threads."""
    ranges, keyspaces = more.pop("ranges", ()), more.pop("keyspaces", ())
    read = BackupOptions(
        ClusterConfig(pd=()), parse(str(place)), executor="driver", concurrency=2, ranges=ranges, keyspaces=keyspaces
    )
    return export(ExportOptions(read, parse(str(folder / "data")), **more))


def recorded(folder: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows that must come out, with user keys."""
    meta = json.loads((folder / "meta.json").read_text())
    rows = golden_rows((folder / meta["expected"]).parent)
    prefix = 4 if meta["dst_api"] == "v2" else 0
    every = [
        {"key": row["k"][prefix:], "value": row["v"], "expire_ts": row["e"] or None, "ts": row.get("ts")}
        for row in rows
    ]
    return sorted(({name: row[name] for name in columns} for row in every), key=lambda row: row["key"])


@pytest.mark.parametrize("name", NAMES)
def test_parquet_has_what_the_records_say(golden: Path, name: str, tmp_path: Path) -> None:
    """Keys, values, expiries and timestamps, by pyarrow's reader of folders."""
    folder = golden / "backups" / name
    done = exported(folder, tmp_path / "out")
    found = ds.dataset(tmp_path / "out").to_table().to_pylist()
    assert sorted(found, key=lambda row: row["key"]) == recorded(folder, done.columns)
    assert done.total_kvs == len(found)
    assert (tmp_path / "out" / "_SUCCESS").read_bytes() == b""


@pytest.mark.parametrize(("kind", "form"), [("csv", "escaped"), ("csv", "hex"), ("jsonl", "escaped"), ("jsonl", "hex")])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_text_has_what_the_records_say(golden: Path, name: str, kind: str, form: str, tmp_path: Path) -> None:
    """The same by Python's csv and json; their numbers are text in CSV."""
    folder = golden / "backups" / name
    done = exported(folder, tmp_path / "out", format=kind, encoding=form)
    csv.field_size_limit(1 << 30)
    rows: list[dict[str, Any]] = []
    for path in sorted((tmp_path / "out").glob(f"part-*.{kind}")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file, strict=True) if kind == "csv" else map(json.loads, file)
    for row in rows:
        row |= {each: parse_key(row[each], form) for each in ("key", "value")}
        row |= {each: int(row[each]) if row[each] else None for each in done.columns[2:]}
    assert rows == recorded(folder, done.columns)


def test_part_of_a_backup(golden: Path, tmp_path: Path) -> None:
    """A range has its rows; one that the backup does not have, and another keyspace, are refused before anything is written."""
    folder = golden / "backups" / "v2_ks4242_rpc"
    rows = recorded(folder, ("key",))
    first, last = rows[len(rows) // 3]["key"], rows[len(rows) // 2]["key"]
    exported(folder, tmp_path / "out", ranges=(KeyRange(first, last),), keyspaces=("4242",))
    found = ds.dataset(tmp_path / "out").to_table(columns=["key"]).to_pylist()
    assert found == [row for row in rows if first <= row["key"] < last]
    with pytest.raises(UsageError, match="does not contain"):
        exported(folder, tmp_path / "none", keyspaces=("1",))
    ranged = golden / "backups" / "v2_ranged"
    with pytest.raises(UsageError, match="does not contain"):
        exported(ranged, tmp_path / "none", ranges=(KeyRange(b"", b""),))
    with pytest.raises(UsageError, match="no keyspace 'sales', and no names"):
        exported(folder, tmp_path / "none", keyspaces=("sales",))
    assert not (tmp_path / "none").exists()


def test_text_that_is_no_text(golden: Path, tmp_path: Path) -> None:
    """--encoding raw refuses the first value or key that is not UTF-8, by its key; the destination is empty again."""
    with pytest.raises(UsageError, match=r"key .* is not valid UTF-8.*--encoding raw") as caught:
        exported(golden / "backups" / "v2", tmp_path / "out", format="csv", encoding="raw")
    assert "--encoding hex" in str(caught.value.hint)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
