"""What exports write, `load raw` reads as it was: any bytes, empty values and expiries, in every notation."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tikv_br.backupset.layout import EXPORT_RECORD
from tikv_br.bulk_load import local
from tikv_br.bulk_load.files import open_files
from tikv_br.errors import UsageError
from tikv_br.formats import columns
from tikv_br.formats.tables import TableFormat, TableOptions, open_table
from tikv_br.storage.url import CloudFlags
from tikv_br.tasks.inputs import Input

ANY = (
    st.binary(max_size=12)
    | st.text(max_size=6).map(str.encode)
    | st.sampled_from([b'"', b"\r\n", b"\\x41", b"\xef\xbb\xbf", b"\0,"])
)
ROWS = st.dictionaries(ANY.filter(bool), st.tuples(ANY, st.just(0) | st.integers(1, 2**40)), max_size=5)


def read(path: Path, **more: str) -> dict[bytes, tuple[bytes, int]]:
    """The rows of an export, by threads; none may be bad."""
    source = Input(str(path), "key", "value", expiry_column="expire_ts", **more)  # type: ignore[arg-type]
    files = open_files(source, CloudFlags())
    local.check_columns(files, source)
    runs = local.read_runs(files, source)
    assert not runs.bad.problems
    batches = [batch for part in runs.partitions(1) for batch in runs.rows(part)]
    return {row["key"]: (row["value"], row["ttl"]) for batch in batches for row in batch.to_pylist()}


def write(folder: Path, rows: dict[bytes, tuple[bytes, int]], options: TableOptions) -> Path:
    """Write one part of an export, and its description."""
    path = folder / f"part-00000{options.format.suffix}"
    with path.open("wb") as file:
        table = open_table(file.write, options)
        keys, values = columns.from_list(list(rows)), columns.from_list([value for value, _ in rows.values()])
        table.append(columns.records(keys, values, expire_ts=np.array([at for _, at in rows.values()], np.uint64)))
        table.finish()
    form = "" if options.format is TableFormat.PARQUET else options.form
    (folder / EXPORT_RECORD).write_text(json.dumps({"encoding": form, "files": [{"name": path.name}]}))
    return path


@pytest.mark.parametrize("kind", TableFormat)
@pytest.mark.parametrize("form", ["hex", "escaped"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_any_bytes(tmp_path: Path, kind: TableFormat, form: str, rows: dict[bytes, tuple[bytes, int]]) -> None:
    """By part and by folder, without a flag: an export says its notation. A part alone needs the flag."""
    if not rows and kind is TableFormat.JSONL:
        return
    path = write(tmp_path, rows, TableOptions(kind, form, expire_ts=True))
    assert read(path) == rows
    assert read(tmp_path, format="json" if kind is TableFormat.JSONL else kind.value) == rows
    (tmp_path / EXPORT_RECORD).unlink()
    if kind is not TableFormat.PARQUET:
        assert read(path, encoding=form) == rows


TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from('",\r\n\\\ufeff\0'), max_size=8).map(str.encode)


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.JSONL])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.dictionaries(TEXT.filter(bool), st.tuples(TEXT, st.just(0) | st.integers(1, 2**40)), min_size=1, max_size=5)
)
def test_any_text(tmp_path: Path, kind: TableFormat, rows: dict[bytes, tuple[bytes, int]]) -> None:
    """As it is; and Python's csv and json read the same."""
    path = write(tmp_path, rows, TableOptions(kind, "raw", expire_ts=True))
    assert read(path) == rows
    with path.open(encoding="utf-8", newline="") as file:
        found = (
            list(csv.DictReader(file))
            if kind is TableFormat.CSV
            else [json.loads(line) for line in file.read().split("\n")[:-1]]
        )
    assert {row["key"].encode(): (row["value"].encode(), int(row["expire_ts"] or 0)) for row in found} == rows


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe or a broken link in a folder that others may write to, also in place of the description of an export."""
    (tmp_path / "a.csv").write_text("key,value,expire_ts\nk,v,5\n")
    os.mkfifo(tmp_path / EXPORT_RECORD)
    assert read(tmp_path / "a.csv") == {b"k": (b"v", 5)}
    (tmp_path / "link.csv").symlink_to("nowhere")
    for odd in ("link.csv", EXPORT_RECORD):
        with pytest.raises(UsageError, match=r"(link.csv|_export.json) is neither a file nor a folder"):
            read(tmp_path, format="csv")
        (tmp_path / odd).unlink()
    assert read(tmp_path, format="csv") == {b"k": (b"v", 5)}
