"""Threads of this process and tasks of Spark read the same rows from an input, or refuse it alike; each example says which rows."""

from __future__ import annotations

import csv
import decimal
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.support.tools import ROOT
from tikv_br.bulk_load import local
from tikv_br.bulk_load.files import NeedsSpark, open_files
from tikv_br.bulk_load.stage import StageContext, StageOptions, text_rows
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import UsageError
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import silent
from tikv_br.storage.url import CloudFlags
from tikv_br.tasks.frames import keyed_rows, read_input, sorted_rows
from tikv_br.tasks.inputs import (
    BAD_TTL,
    NOT_JSON,
    NOT_TEXT,
    OTHER_FIELDS,
    OTHER_TYPE,
    REPEATED_NAME,
    UNREADABLE,
    CsvDialect,
    Input,
)

Row = tuple[bytes, bytes, int]
Found = tuple[list[Row], Counter[str], list[str]] | str
"""Rows in order, the bad rows by their problem, and where the first ones are; or the refusal."""
LEFT = "left to Spark"


def by_spark(session: SparkSession, source: Input) -> Found:
    """Rows of an input according to tasks of Spark."""
    context = StageContext(
        cast("BackupOptions", None), silent, listed=False, stage=StageOptions(source), stack=ExitStack()
    )
    context.session = session
    try:
        files = open_files(source, CloudFlags())
        local.check_columns(files, source)
        if source.is_text:
            rows = text_rows(context, files, RowLimits())
        else:
            rows = keyed_rows(read_input(session, source, [file.name for file in files.files]), source)
        found = sorted_rows(rows, 1).collect()
    except NeedsSpark:
        return LEFT
    except UsageError as error:
        return error.message
    problems = Counter(row["problem"] for row in found if row["problem"])
    if problems[UNREADABLE]:
        return next(str(row["place"]) for row in found if row["problem"] == UNREADABLE)
    rows_found = [(bytes(row["key"]), bytes(row["value"]), row["ttl"]) for row in found if not row["problem"]]
    return rows_found, problems, sorted(row["place"] for row in found if row["place"])


def by_threads(source: Input) -> Found:
    """Rows of an input according to this process."""
    try:
        files = open_files(source, CloudFlags())
        local.check_columns(files, source)
        runs = local.read_runs(files, source)
    except NeedsSpark:
        return LEFT
    except UsageError as error:
        return error.message.removeprefix("task reading the input: ")
    batches = [batch for part in runs.partitions(3) for batch in runs.rows(part)]
    rows: list[Row] = [(row["key"], row["value"], row["ttl"]) for batch in batches for row in batch.to_pylist()]
    return rows, runs.bad.problems, sorted(map(str, runs.bad.examples))


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


def hidden(folder: Path) -> None:
    """Files that Spark leaves out."""
    table(folder, id=["a"], v=["1"])
    (folder / "_SUCCESS").touch()
    (folder / ".0.parquet.part").write_bytes(b"x")


TEXTS: dict[str, tuple[Callable[[Path], None], object]] = {
    "csv": (text("csv", "id,v\nb,1\na,2\n"), {"a": "2", "b": "1"}),
    "csv, no last line break": (text("csv", "id,v\r\nb,1\r\na,2"), {"a": "2", "b": "1"}),
    "csv, CR": (text("csv", "id,v\rb,1\ra,2"), {"a": "2", "b": "1"}),
    "csv, a byte order mark": (text("csv", "\ufeffid,v\na,1\n"), {"a": "1"}),
    "csv, a byte order mark before a quote": (text("csv", '\ufeff"id",v\na,1\n'), {"a": "1"}),
    "csv, the same sign as data": (text("csv", "id,v\n\ufeffa,\ufeff\n"), {"\ufeffa": "\ufeff"}),
    "csv, JSON as values": (text("csv", 'id,v\na,"{""n"": ""Ann"", ""m"": 1}"\n'), {"a": '{"n": "Ann", "m": 1}'}),
    "csv, quoted": (
        text("csv", 'id,v\n"b, c","1"\na,"x, y"\n', 'id,v\n"c","ä"\n'),
        {"a": "x, y", "b, c": "1", "c": "ä"},
    ),
    "csv, line breaks in quotes": (
        text("csv", 'id,v\n"a\nb","1\r\n2"\nb,"\r"\nc,"\n"\n'),
        {"a\nb": "1\r\n2", "b": "\r", "c": "\n"},
    ),
    "csv, quotes only": (text("csv", 'id,v\na,""""\nb,""""""\n'), {"a": '"', "b": '""'}),
    "csv, backslashes": (text("csv", 'id,v\na,\\\nb,"\\"\nc,\\N\n'), {"a": "\\", "b": "\\", "c": "\\N"}),
    "csv, blanks and control characters stay": (
        text("csv", "id,v\n a , 1\n\nb,2 \nc,\0\x1c\x85\n"),
        {" a ": " 1", "b": "2 ", "c": "\0\x1c\x85"},
    ),
    "csv, empty and null": (
        text("csv", 'id,v\na,\nb,""\n,1\n"",2\nc,3\n'),
        ({"b": "", "c": "3"}, {"null value": [2], "null key": [4], "empty key": [5]}),
    ),
    "csv, compressed": (text("csv.gz", "id,v\nb,1\na,2\n"), {"a": "2", "b": "1"}),
    "csv, repeated keys": (
        text("csv", "id,v,n\na,1,9\na,2,10\nb,1,\nb,2,\na,3,9\n"),
        [("a", "3"), ("a", "1"), ("a", "2"), ("b", "2"), ("b", "1")],
    ),
    "csv, only a header": (text("csv", "id,v\n"), {}),
    "csv, other columns repeated": (text("csv", "x,id,x,v,ID\n1,a,2,b,3\n"), {"a": "b"}),
    "csv, columns in another order": (text("csv", "id,v\na,1\n", "v,id\n1,b\n"), {"a": "1", "b": "1"}),
    "csv, ragged": (
        text("csv", 'id,v\na,"1\n2"\nb,1,2\nc\n   \nd,2\n'),
        ({"a": "1\n2", "d": "2"}, {OTHER_FIELDS: [4, 5, 6]}),
    ),
    "csv, not UTF-8": (
        text("csv", "id,v\na,\udce4\nb,ä\n\udcff,1\nc,x\udc80,y\n"),
        ({"b": "ä"}, {NOT_TEXT: [2, 4], OTHER_FIELDS: [5]}),
    ),
    "csv, an unquoted field with a quote": (text("csv", 'id,v\nx,1\na,5" disk\n'), "0.csv, line 3: a quote"),
    "csv, text behind a quote": (text("csv", 'id,v\n"x\ny",1\na,"b"c\n'), "0.csv, line 4: a quote"),
    "csv, a blank behind a quote": (text("csv", 'id,v\na,"b" \n'), "0.csv, line 2: a quote"),
    "csv, a quote that is not closed": (text("csv", 'id,v\nx,1\na,"b\nc,2\n'), "0.csv, line 3: a quote"),
    "csv, no bytes": (text("csv", "id,v\na,1\n", ""), "1.csv of the input is empty"),
    "csv, without the column": (text("csv", "id,x\na,1\n"), "--value-column: .*0.csv has no column 'v'"),
    "csv, the column twice": (text("csv", "id,v,v\na,1,2\n"), "0.csv has more than one column 'v'"),
    "json": (lines({"id": "b", "v": "1"}, {"v": 'ä\n"\\', "id": "a", "more": [1]}), {"a": 'ä\n"\\', "b": "1"}),
    "json, missing and null": (
        lines({"id": "a", "v": "1"}, {"id": "b"}, {"v": "2"}, {"id": None, "v": "3"}, {"id": "", "v": "4"}),
        ({"a": "1"}, {"null value": [2], "null key": [3, 4], "empty key": [5]}),
    ),
    "json, values as they stand": (
        text(
            "jsonl",
            '{"id":"a","v":{"price":1.10,"big":12345678901234567890,"n":1,"b":1.0,"a":"\\u00e9"}}\n'
            '{"id":"b","v": [1, 2,{ }] ,"more":1}\n{"id":"c","v":{"n":1,"n":2}}\r\n{"id":"d","v":"{}"}\n{"id":"e","v":[]}',
        ),
        {
            "a": '{"price":1.10,"big":12345678901234567890,"n":1,"b":1.0,"a":"\\u00e9"}',
            "b": "[1, 2,{ }]",
            "c": '{"n":1,"n":2}',
            "d": "{}",
            "e": "[]",
        },
    ),
    "json, escapes": (
        text("jsonl", '{"id":"\\u00e9\\/","v":"\\ud83d\\ude00"}\n{"id":"\\u0000","v":"x"}\n'),
        {"é/": "😀", "\0": "x"},
    ),
    "json, a byte order mark and blank lines": (
        text("jsonl", '\ufeff{"id":"a","v":"1"}\n\n  \n{"id":"b","v":"2"}\n'),
        {"a": "1", "b": "2"},
    ),
    "json, dates stay text": (
        lines({"id": "2020-01-01", "v": "2020-01-01 00:00:00"}),
        {"2020-01-01": "2020-01-01 00:00:00"},
    ),
    "json, other columns of mixed types": (
        lines({"id": "a", "v": "1", "x": 1}, {"id": "b", "v": "2", "x": {"y": []}}),
        {"a": "1", "b": "2"},
    ),
    "json, more digits than Python reads": (
        text("jsonl", f'{{"id":"a","v":"1","x":{"1" * 5000}}}\n{{"id":"\\u0062","v":"2","x":{"2" * 5000}}}\n'),
        {"a": "1", "b": "2"},
    ),
    "json, nested too deeply": (
        text("jsonl", f'{{"id":"a","v":"1"}}\n{{"id":"b","v":"2","x":{"[" * 5000}1{"]" * 5000}}}\n{{"id":\n'),
        ({"a": "1"}, {NOT_JSON: [2, 3]}),
    ),
    "json, compressed": (text("json.gz", '{"id":"a","v":"1"}\n{"id":"b","v":"2"}'), {"a": "1", "b": "2"}),
    "json, no bytes": (text("jsonl", '{"id":"a","v":"1"}\n', ""), {"a": "1"}),
    "json, lines that are refused": (
        text(
            "jsonl",
            '{"id":"a","v":"1"}\n{"id":"b",\n{"id":"c","v":"1"}{"id":"d","v":"2"}\n[{"id":"e","v":"1"}]\n'
            '{\'id\':\'f\',\'v\':\'1\'}\n{"id":"g","id":"h","v":"1"}\n'
            '{"id":"i","\\u0069d":"j","v":"1"}\n{"id":"k","v":"\\ud800"}\n{"id":"l","v":"\udcff"}\n'
            '{"id":"m","v":1}\n{"id":"n","v":true}\n{"id":{},"v":"1"}\n{"id":"o","v":NaN}\n{"id":"p","v":{"x":"\udcff"}}\n',
        ),
        (
            {"a": "1"},
            {NOT_JSON: [2, 3, 4, 5, 8, 13], REPEATED_NAME: [6, 7], NOT_TEXT: [9, 14], OTHER_TYPE: [10, 11, 12]},
        ),
    ),
    "json, a double": (lines({"id": "a", "v": 1.5}), "--value-column: column 'v' has type double"),
    "json, an object as key": (lines({"id": {"x": 1}, "v": "1"}), "--key-column: column 'id' has type struct"),
    "json, without the column": (lines({"id": "a", "x": "1"}), "--value-column: the input has no column 'v'"),
}
"""Inputs of text, and what they are: rows, rows and the lines of bad ones by their problem, or the refusal."""
TABLES = {
    "too long and too large": parquet(id=["a", "k" * 8193, "k" * 8192, "c"], v=["1", "2", "3", "x" * (8 << 20)]),
    "parquet, null and empty": parquet(id=["a", None, "", "c"], v=[b"1", b"2", b"3", None]),
    "parquet, integers": parquet(
        id=pa.array([3, -1, None, 127], pa.int8()), v=pa.array([2**32 - 1, 0, 1, 2], pa.uint32())
    ),
    "parquet, large text": parquet(id=pa.array(["b", "a"], pa.large_string()), v=pa.array([b"", b"\xff"])),
    "parquet, categories": parquet(
        id=pa.array(["b", "a"]).dictionary_encode(), v=pa.array(["1", "1"]).dictionary_encode()
    ),
    "parquet, fixed sizes": parquet(id=pa.array([b"ab", b"cd"], pa.binary(2)), v=["1", "2"]),
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
}
"""Inputs that Spark reads with its own reader."""


def source_of(folder: Path, name: str) -> Input:
    """The input of an example; its kind is the first word of its name."""
    kind = name.partition(",")[0] if name.startswith(("csv", "json")) else "parquet"
    return Input(str(folder), "id", "v", order_column="n" if "repeated keys" in name else "", format=kind)


def check(found: Found, expected: object) -> None:
    """Compare rows, and the lines of bad rows; or the message."""
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert re.search(expected, found)
        return
    wanted, bad = expected if isinstance(expected, tuple) else (expected, {})
    pairs = sorted(wanted.items()) if isinstance(wanted, dict) else wanted
    assert not isinstance(found, str), found
    rows, problems, places = found
    assert [(key.decode(), value.decode()) for key, value, _ in rows] == pairs
    assert problems == {problem: len(at) for problem, at in bad.items()}
    shown = {(match[2], int(match[1])) for place in places if (match := re.search(r"line (\d+).*?: ([^:]*)$", place))}
    assert len(shown) == min(sum(map(len, bad.values())), 5) or len(shown) == len(places)
    assert shown <= {(problem, line) for problem, at in bad.items() for line in at}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_read_as_it_is_written(tmp_path: Path, name: str) -> None:
    """Rows as written, the line of each bad row, or a refusal that names file and line; in blocks of any size."""
    write, expected = TEXTS[name]
    write(tmp_path)
    for block in (1, 7, 40, 1 << 24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tikv_br.bulk_load.files.BLOCK_BYTES", block)
            check(by_threads(source_of(tmp_path, name)), expected)


@pytest.mark.slow
def test_spark_reads_text_as_threads_do(session: SparkSession, tmp_path: Path) -> None:
    """All examples through both; equal rows, counts, places and messages."""
    for number, (name, (write, expected)) in enumerate(TEXTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        source = source_of(folder, name)
        found = by_spark(session, source)
        check(found, expected)
        assert found == by_threads(source), name


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_those_of_spark(session: SparkSession, tmp_path: Path, name: str) -> None:
    """Rows, their order, the counts of bad rows, and refusals."""
    TABLES[name](tmp_path)
    source = source_of(tmp_path, name)
    found = by_threads(source)
    assert found == by_spark(session, source)


@pytest.mark.parametrize(
    ("dialect", "content", "expected"),
    [
        (CsvDialect(";"), b'id;v\na,b;1\nc;"x;y"\n', {"a,b": "1", "c": "x;y"}),
        (CsvDialect("\t"), b"id\tv\na b\t1\n", {"a b": "1"}),
        (CsvDialect(quote="'"), b"id,v\na,'x''y'\nb,\"\n", {"a": "x'y", "b": '"'}),
        (CsvDialect(quote=""), b'id,v\na,5" disk\nb,"x"\n', {"a": '5" disk', "b": '"x"'}),
        (
            CsvDialect(escape="\\"),
            b'id,v\na,"x\\"y\\\\"\nb,p\\,q\nc,"r""\\\ns"\n',
            {"a": 'x"y\\', "b": "p,q", "c": 'r"\ns'},
        ),
        (CsvDialect(null="\\N"), b'id,v\na,\nb,\\N\nc,"\\N"\n', ({"a": "", "c": "\\N"}, {"null value": [3]})),
        (CsvDialect(encoding="latin-1"), b"id,v\n\xe4,\xff\n", {"\xe4": "\xff"}),
        (CsvDialect(encoding="cp1252"), b"id,v\na,\x80\nb,\x81\n", ({"a": "\u20ac"}, {NOT_TEXT: [3]})),
        (CsvDialect(encoding="utf-16"), "id,v\na,\xe4\U0001f600\n".encode("utf-16"), {"a": "\xe4\U0001f600"}),
        (CsvDialect(encoding="utf-16-le"), b"\xff\xfei\0d\0,\0v\0\n\0a\0,\0\x00\xd8\n\0", ({}, {NOT_TEXT: [2]})),
        (CsvDialect(encoding="gb18030"), "id,v\n\u4e2d,\u6587\n".encode("gb18030"), {"\u4e2d": "\u6587"}),
    ],
)
def test_dialects_of_csv(tmp_path: Path, dialect: CsvDialect, content: bytes, expected: object) -> None:
    """Each by a flag of its own, in blocks of any size."""
    (tmp_path / "0.csv").write_bytes(content)
    for block in (1, 5, 1 << 24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tikv_br.bulk_load.files.BLOCK_BYTES", block)
            check(by_threads(Input(str(tmp_path), "id", "v", format="csv", csv=dialect)), expected)


@pytest.mark.parametrize(
    "wrong", [{"delimiter": "::"}, {"quote": "\n"}, {"delimiter": '"'}, {"encoding": "hex"}, {"escape": "ä"}]
)
def test_dialects_that_are_none(wrong: dict[str, str]) -> None:
    """A sign that is no single one of ASCII, or has two meanings, and what is no encoding of text."""
    with pytest.raises(UsageError, match=f"--csv-{next(iter(wrong))}"):
        CsvDialect(**wrong)


def test_ttls_and_expiries(session: SparkSession, tmp_path: Path) -> None:
    """Null is no expiry, in CSV and Parquet; what is no positive integer is a bad row."""
    texts = ["5", None, "0", "x", " 5", "5.0", "-1", "9" * 19, "5\n"]
    (tmp_path / "c").mkdir()
    (tmp_path / "p").mkdir()
    with (tmp_path / "c" / "0.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "v", "t"], *([f"k{at}", "v", text] for at, text in enumerate(texts))])
    table(tmp_path / "p", id=[f"k{at}" for at in range(9)], v=["v"] * 9, t=texts)
    table(tmp_path / "p", id=["u1", "u2"], v=["v", "v"], t=pa.array(["7", None]))
    for kind, more in (("c", []), ("p", [(b"u1", b"v", 7), (b"u2", b"v", 0)])):
        for names in ({"ttl_column": "t"}, {"expiry_column": "t"}):
            source = Input(str(tmp_path / kind), "id", "v", format="csv" if kind == "c" else "parquet", **names)  # type: ignore[arg-type]
            found = by_threads(source)
            assert found[:2] == ([(b"k0", b"v", 5), (b"k1", b"v", 0), *more], {BAD_TTL: 7})
            assert found == by_spark(session, source)


FIELD = st.text(st.sampled_from("ab,\"\\ \t\r\n'é;0\ufeff\0"), max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(FIELD.filter(bool), FIELD), max_size=5, unique_by=lambda row: row[0]),
    style=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
    block=st.integers(1, 40),
)
def test_what_python_s_csv_writes(
    tmp_path: Path, rows: list[tuple[str, str]], style: int, end: str, block: int
) -> None:
    """Any text, in blocks of any size."""
    with (tmp_path / "0.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=style, lineterminator=end).writerows([("id", "v"), *rows])  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tikv_br.bulk_load.files.BLOCK_BYTES", block)
        found = by_threads(Input(str(tmp_path / "0.csv"), "id", "v"))
    assert found == (sorted((key.encode(), value.encode(), 0) for key, value in rows), Counter(), [])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=30) | st.text(st.sampled_from('ab,"\r\n'), max_size=20).map(str.encode),
    block=st.integers(1, 40),
)
def test_any_bytes_as_csv(tmp_path: Path, data: bytes, block: int) -> None:
    """Whatever a file has: rows or a refusal, the same in blocks of any size."""
    (tmp_path / "0.csv").write_bytes(b"id,v\n" + data)
    source = Input(str(tmp_path / "0.csv"), "id", "v")
    whole = by_threads(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tikv_br.bulk_load.files.BLOCK_BYTES", block)
        assert by_threads(source) == whole


def nest(folder: Path, write: Callable[[Path, str], object]) -> None:
    """Files at three depths, and hidden ones."""
    for number, name in enumerate((".", "sub", "sub/day=1", "sub/_temporary/0", ".git", "sub/deep")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write(folder / name / f"{number}", f"k{number}")
    (folder / "_SUCCESS").touch()


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "csv": lambda path, key: path.with_suffix(".csv").write_text(f"id,v\n{key},1\n"),
    "json": lambda path, key: path.with_suffix(".jsonl").write_text(json.dumps({"id": key, "v": "1"})),
    "parquet": lambda path, key: pq.write_table(pa.table({"id": [key], "v": ["1"]}), path.with_suffix(".parquet")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_folders_are_read_whole(session: SparkSession, tmp_path: Path, kind: str) -> None:
    """At any depth, without hidden files, which are counted; by folder and by pattern."""
    nest(tmp_path / "in", WRITERS[kind])
    for path in (tmp_path / "in", tmp_path / "i*", tmp_path / "in" / "*"):
        source = Input(str(path), "id", "v", format=kind)
        found = by_threads(source)
        assert found[0] == [(key, b"1", 0) for key in (b"k0", b"k1", b"k2", b"k5")]
        assert open_files(source, CloudFlags()).hidden == 3
        assert found == by_spark(session, source)


def test_partitions_in_names_are_for_spark(session: SparkSession, tmp_path: Path) -> None:
    """A column that only names of folders have; folders in these are read too, and no file outside of them is left out silently."""
    (tmp_path / "in" / "n=1").mkdir(parents=True)
    table(tmp_path / "in" / "n=1", id=["a"], v=["1"])
    source = Input(str(tmp_path / "in"), "id", "v", order_column="n", format="parquet")
    assert by_threads(source) == LEFT
    assert [row["id"] for row in read_input(session, source).collect()] == ["a"]
    (tmp_path / "in" / "n=1" / "sub").mkdir()
    table(tmp_path / "in" / "n=1" / "sub", id=["b"], v=["2"])
    assert sorted(row["id"] for row in read_input(session, source).collect()) == ["a", "b"]
    table(tmp_path / "in", id=["c"], v=["2"])
    with pytest.raises(UsageError, match=r"1 files that are not in folders named n=…"):
        read_input(session, source).collect()


@pytest.mark.parametrize("content", [b"", b"PAR1 no PAR1"])
def test_what_is_no_parquet_is_named(session: SparkSession, tmp_path: Path, content: bytes) -> None:
    """By both readers, also where Spark finds the files."""
    table(tmp_path, id=["a"], v=["1"])
    (tmp_path / "broken.parquet").write_bytes(content)
    source = Input(str(tmp_path), "id", "v", format="parquet")
    assert "broken.parquet" in by_threads(source)
    assert "broken.parquet" in by_spark(session, source)
    if not content:
        with pytest.raises(UsageError, match=r"broken\.parquet of the input has no bytes"):
            read_input(session, Input(f"file://{tmp_path}", "id", "v", format="parquet"))


def test_spark_s_own_reader(session: SparkSession, tmp_path: Path) -> None:
    """With options or where only Spark gets: CSV of RFC 4180, replaced bytes are bad rows, JSON is not written anew."""
    text("csv", 'id,v\na,"{""n"": 1}"\nb,"x\ny"\nc,\udcff\n')(tmp_path)
    for options in ((("sep", ","),), ()):
        path = str(tmp_path) if options else f"file://{tmp_path}"
        source = Input(path, "id", "v", format="csv", reader_options=options)
        rows = {
            row["key"] and bytes(row["key"]): row for row in keyed_rows(read_input(session, source), source).collect()
        }
        assert {key: bytes(row["value"]) for key, row in rows.items() if key} == {b"a": b'{"n": 1}', b"b": b"x\ny"}
        assert rows[None]["problem"] == NOT_TEXT
    lines({"id": "a", "v": {"x": 1.10}})(tmp_path)
    source = Input(f"file://{tmp_path}/*.jsonl", "id", "v")
    with pytest.raises(UsageError, match="write the JSON of the values anew"):
        keyed_rows(read_input(session, source), source)


FOREIGN = ROOT / "tests" / "data" / "foreign"


@pytest.mark.slow
def test_foreign_files(session: SparkSession) -> None:
    """What pandas, polars, DuckDB, csv, pyarrow and Spark have written: the rows of their README, through both readers."""
    seen = 0
    for name, expected in json.loads((FOREIGN / "expected.json").read_text(encoding="utf-8")).items():
        encoding = "latin-1" if name == "bytes" else "utf-8"
        rows = [(key.encode(encoding), value.encode(encoding), ttl) for key, value, ttl in expected["rows"]]
        for path in sorted(FOREIGN.glob(f"{name}.*")):
            ttl_column = "t" if expected.get("ttl") else ""
            source = Input(str(path), "id", "v", ttl_column, csv=CsvDialect(**expected.get("csv", {})))
            found = by_threads(source)
            assert found == (rows, Counter(), []), path.name
            assert by_spark(session, source) == found, path.name
            seen += 1
    assert seen == len(list(FOREIGN.iterdir())) - 3


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
    assert by_threads(source) == (expected, Counter(), [])
    assert set(tmp_path.iterdir()) == before


def test_text_is_cut_at_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts and blocks that end within lines lose and repeat none."""
    for part, block in ((7, 5), (16, 64), (1, 1)):
        monkeypatch.setattr("tikv_br.bulk_load.files.PART_BYTES", part)
        monkeypatch.setattr("tikv_br.bulk_load.files.BLOCK_BYTES", block)
        text("csv", "id,v\n" + "".join(f"key{number},{'x' * number}\n" for number in range(1, 30)))(tmp_path)
        rows = by_threads(Input(str(tmp_path), "id", "v", format="csv"))
        assert rows == (sorted((b"key%d" % number, b"x" * number, 0) for number in range(1, 30)), Counter(), [])
