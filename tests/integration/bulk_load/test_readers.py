"""This process and Spark read the same rows from an input, or refuse it alike, or it is left to Spark."""

from __future__ import annotations

import decimal
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tikv_br.bulk_load import local
from tikv_br.bulk_load.files import open_files
from tikv_br.bulk_load.inputs import NeedsSpark
from tikv_br.errors import UsageError
from tikv_br.storage.cloud_options import CloudFlags
from tikv_br.tasks.frames import keyed_rows, read_input, sorted_rows
from tikv_br.tasks.inputs import Input

Found = tuple[list[tuple[bytes, bytes, int]], Counter[str]] | str
"""Rows in order, and the bad rows by their problem; or the refusal."""
LEFT = "left to Spark"


def by_spark(session: SparkSession, source: Input) -> Found:
    """Rows of an input according to Spark."""
    try:
        rows = keyed_rows(read_input(session, source), source)
        found = sorted_rows(rows, 1).collect()
    except UsageError as error:
        return error.message
    except Exception:  # noqa: BLE001 - of any reader
        return "failed"
    problems = Counter(row["problem"] for row in found if row["problem"])
    return [(bytes(row["key"]), bytes(row["value"]), row["ttl"]) for row in found if not row["problem"]], problems


def by_threads(source: Input) -> Found:
    """Rows of an input according to this process."""
    try:
        files = open_files(source, CloudFlags(), 1 << 40)
        local.check_columns(files, source)
        runs = local.read_runs(files, source)
    except NeedsSpark:
        return LEFT
    except UsageError as error:
        return error.message
    batches = [batch for part in runs.partitions(3) for batch in runs.rows(part)]
    rows = [tuple(row[name] for name in ("key", "value", "ttl")) for batch in batches for row in batch.to_pylist()]
    return rows, runs.problems


def table(folder: Path, **columns: object) -> None:
    """Write a Parquet file with these columns."""
    pq.write_table(pa.table(columns), folder / f"{len(list(folder.iterdir()))}.parquet", row_group_size=2)


def text(name: str, *contents: str) -> Callable[[Path], None]:
    """Write files of text, the first one with the suffix of the name."""

    def write(folder: Path) -> None:
        for number, content in enumerate(contents):
            data = content.encode("utf-8", "surrogateescape")
            (folder / f"{number}.{name}").write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    return write


def lines(*rows: object) -> Callable[[Path], None]:
    """Write JSON lines."""
    return text("jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def parquet(**columns: object) -> Callable[[Path], None]:
    """Write one Parquet file."""
    return lambda folder: table(folder, **columns)


def two_tables(folder: Path) -> None:
    """Two files whose columns have another order, and others that are not used."""
    table(folder, id=["b", "a"], v=["1", "2"], more=[1, 2])
    table(folder, v=["3"], id=["c"])


def drift(folder: Path) -> None:
    """The second file has another type."""
    table(folder, id=["b"], v=[1])
    table(folder, id=["a"], v=["2"])


def hive(folder: Path) -> None:
    """A partition in the name of a folder."""
    (folder / "day=1").mkdir()
    table(folder / "day=1", id=["a"], v=["1"])


def hidden(folder: Path) -> None:
    """Files that Spark leaves out."""
    table(folder, id=["a"], v=["1"])
    (folder / "_SUCCESS").touch()
    (folder / ".0.parquet.part").write_bytes(b"x")


READ = {
    "csv": text("csv", "id,v\nb,1\na,2\n"),
    "too long and too large": parquet(id=["a", "k" * 8193, "k" * 8192, "c"], v=["1", "2", "3", "x" * (8 << 20)]),
    "csv, no last line break": text("csv", "id,v\r\nb,1\r\na,2"),
    "csv, quoted": text("csv", 'id,v\n"b, c","1"\na,"x, y"\n', 'id,v\n"c","ä"\n'),
    "csv, empty and quoted empty": text("csv", 'id,v\na,\nb,""\n,1\n"",2\nc,3\n'),
    "csv, blanks stay": text("csv", "id,v\n a , 1\n\nb,2 \n"),
    "csv, compressed": text("csv.gz", "id,v\nb,1\na,2\n"),
    "csv, repeated keys": text("csv", "id,v,n\na,1,9\na,2,10\nb,1,\nb,2,\na,3,9\n"),
    "csv, only a header": text("csv", "id,v\n"),
    "json": lines({"id": "b", "v": "1"}, {"v": 'ä\n"\\', "id": "a", "more": [1]}),
    "json, missing and null": lines({"id": "a", "v": "1"}, {"id": "b"}, {"v": "2"}, {"id": None, "v": "3"}),
    "json, integers": lines({"id": 5, "v": -(2**63)}, {"id": -1, "v": 2**63 - 1}, {"id": None, "v": 0}),
    "json, escapes": text("jsonl", '{"id":"\\u00e9\\/","v":"\\ud83d\\ude00"}\n{"id":"\\u0000","v":"x"}\n'),
    "json, dates stay text": lines({"id": "2020-01-01", "v": "2020-01-01 00:00:00"}),
    "json, other columns of mixed types": lines({"id": "a", "v": "1", "x": 1}, {"id": "b", "v": "2", "x": {"y": []}}),
    "json, compressed": text("json.gz", '{"id":"a","v":"1"}\n{"id":"b","v":"2"}'),
    "parquet, null and empty": parquet(id=["a", None, "", "c"], v=[b"1", b"2", b"3", None]),
    "parquet, integers": parquet(
        id=pa.array([3, -1, None, 127], pa.int8()), v=pa.array([2**32 - 1, 0, 1, 2], pa.uint32())
    ),
    "parquet, large text": parquet(id=pa.array(["b", "a"], pa.large_string()), v=pa.array([b"", b"\xff"])),
    "parquet, repeated keys by time": parquet(
        id=["a", "a", "b", "b", "a"],
        v=["1", "2", "3", "4", "5"],
        n=pa.array([None, 5, 6, 7, 5], pa.timestamp("us")),
    ),
    "parquet, repeated keys by decimal": parquet(
        id=["a", "a", "a"], v=["1", "2", "3"], n=[decimal.Decimal("1.10"), decimal.Decimal("-9.99"), None]
    ),
    "parquet, repeated keys by bytes": parquet(id=["a"] * 4, v=["1", "2", "3", "4"], n=[b"\x7f", b"\xff", None, b""]),
    "parquet, files of other columns": two_tables,
    "parquet, hidden files": hidden,
    "refused: no column": parquet(id=["a"], x=["1"]),
    "refused: double": parquet(id=["a"], v=[0.5]),
    "refused: boolean key": parquet(id=[True], v=["1"]),
    "refused: timestamp": parquet(id=["a"], v=pa.array([0], pa.timestamp("us"))),
    "refused: csv without the column": text("csv", "id,x\na,1\n"),
}
"""Inputs that this process reads, or refuses."""
LEAVES = {
    "csv, quotes in a field": text("csv", 'id,v\na,"1""2"\n'),
    "csv, a quote in the middle": text("csv", 'id,v\na,5" disk\n'),
    "csv, a line break in a field": text("csv", 'id,v\na,"1\n2"\n'),
    "csv, a backslash": text("csv", 'id,v\na,"x\\",y"\n'),
    "csv, other headers": text("csv", "id,v\na,1\n", "v,id\n1,b\n"),
    "csv, too many fields": text("csv", "id,v\na,1,2\nb\n"),
    "csv, not UTF-8": text("csv", "id,v\na,\udcff\n"),
    "csv, a line of blanks": text("csv", "id,v\na,1\n  \nb,2\n"),
    "csv, repeated column": text("csv", "id,v,ID\na,1,2\n"),
    "json, mixed types": lines({"id": "a", "v": "1"}, {"id": "b", "v": 2}),
    "json, nested": lines({"id": "a", "v": {"x": 1}}),
    "json, doubles": lines({"id": "a", "v": 1.5}),
    "json, late double": lines(
        {"id": "a", "v": 1}, *({"id": str(number), "v": 1} for number in range(1100)), {"v": 1.5}
    ),
    "json, broken": text("jsonl", '{"id":"a","v":"1"}\n{"id":"b",\n'),
    "json, two objects in a line": text("jsonl", '{"id":"a","v":"1"}{"id":"b","v":"2"}\n'),
    "json, an array": text("jsonl", '[{"id":"a","v":"1"},{"id":"b","v":"2"}]\n'),
    "json, single quotes": text("jsonl", "{'id':'a','v':'1'}\n"),
    "json, repeated name": text("jsonl", '{"id":"a","id":"b","v":"1"}\n'),
    "json, a blank line": text("jsonl", '{"id":"a","v":"1"}\n\n{"id":"b","v":"1"}\n'),
    "parquet, another type": drift,
    "parquet, a partition": hive,
    "parquet, nested": parquet(id=["a"], v=[{"x": 1}]),
    "parquet, not Parquet": text("parquet", "PAR1 no PAR1"),
    "no file": text("parquet"),
}
"""Inputs that Spark reads in another way than Arrow, or refuses."""


def source_of(folder: Path, name: str) -> Input:
    """The input of an example; its kind is the first word of its name."""
    files = sorted(folder.iterdir())
    kind = "csv" if files and ".csv" in files[0].name else "json" if files and ".json" in files[0].name else "parquet"
    return Input(str(folder), "id", "v", order_column="n" if "repeated keys" in name else "", format=kind)


@pytest.mark.parametrize("name", READ)
def test_rows_are_those_of_spark(session: SparkSession, tmp_path: Path, name: str) -> None:
    """Rows, their order, the counts of bad rows, and refusals."""
    READ[name](tmp_path)
    source = source_of(tmp_path, name)
    found = by_threads(source)
    assert found == by_spark(session, source)


@pytest.mark.parametrize("name", LEAVES)
def test_inputs_that_differ_are_left_to_spark(tmp_path: Path, name: str) -> None:
    """Before a row of them is loaded."""
    LEAVES[name](tmp_path)
    assert by_threads(source_of(tmp_path, name)) == LEFT


@pytest.mark.parametrize(
    ("options", "content"),
    [
        ((("sep", ";"),), 'id;v\na,b;1\nc;"x;y"\n'),
        ((("nullValue", "\\N"),), 'id,v\na,""\nb,\nc,"N"\n'),
        ((("nullValue", "-"),), 'id,v\na,""\nb,-\nc,"-"\n-,4\nd,\n'),
    ],
)
def test_options_of_csv(
    session: SparkSession, tmp_path: Path, options: tuple[tuple[str, str], ...], content: str
) -> None:
    """Separator and the text of null; all other options are left to Spark."""
    text("csv", content)(tmp_path)
    source = Input(str(tmp_path / "*.csv"), "id", "v", reader_options=options)
    assert by_threads(source) == by_spark(session, source)
    assert by_threads(Input(str(tmp_path), "id", "v", format="csv", reader_options=(("mode", "FAILFAST"),))) == LEFT


def test_ttls_of_text(session: SparkSession, tmp_path: Path) -> None:
    """Plain numbers; others are left to Spark."""
    text("csv", "id,v,t\na,1,5\nb,2,0\nc,3,\n")(tmp_path)
    source = Input(str(tmp_path), "id", "v", ttl_column="t", format="csv")
    assert by_threads(source) == by_spark(session, source)
    text("csv", "id,v,t\na,1, 5\n")(tmp_path)
    assert by_threads(source) == LEFT


FIELD = st.text(st.sampled_from("ab,\"\\ \t\r\n'é;0"), max_size=4)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(FIELD, FIELD), max_size=4), quoted=st.booleans())
def test_any_csv(session: SparkSession, tmp_path: Path, rows: list[tuple[str, str]], *, quoted: bool) -> None:
    """Inputs that this process accepts are read as Spark does."""
    sign = '"' if quoted else ""
    (tmp_path / "0.csv").write_bytes(
        b"id,v\n" + "".join(f"{sign}{key}{sign},{sign}{value}{sign}\n" for key, value in rows).encode()
    )
    source = Input(str(tmp_path / "0.csv"), "id", "v")
    found = by_threads(source)
    assert found in (LEFT, by_spark(session, source))


def test_runs_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that do not fit into memory are the same, and no file is left."""
    keys = [f"k{number * 7919 % 5000:05}" for number in range(5000)]
    table(tmp_path, id=keys, v=keys)
    source = Input(str(tmp_path), "id", "v", format="parquet")
    expected = [(key.encode(), key.encode(), 0) for key in sorted(keys)]
    monkeypatch.setattr(local, "MEMORY_BYTES", 1000)
    monkeypatch.setattr(local, "RUN_BYTES", 10_000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    assert by_threads(source) == (expected, Counter())
    assert set(tmp_path.iterdir()) == before


def test_text_is_cut_at_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts and blocks that end within lines lose and repeat none."""
    for part, block in ((7, 5), (16, 64), (1, 1)):
        monkeypatch.setattr("tikv_br.bulk_load.text.PART_BYTES", part)
        monkeypatch.setattr("tikv_br.bulk_load.text.BLOCK_BYTES", block)
        text("csv", "id,v\n" + "".join(f"key{number},{'x' * number}\n" for number in range(1, 30)))(tmp_path)
        rows = by_threads(Input(str(tmp_path), "id", "v", format="csv"))
        assert rows == (sorted((b"key%d" % number, b"x" * number, 0) for number in range(1, 30)), Counter())
