"""Sources: every file form to the same records, and errors that name file and line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tikv_br.errors import UsageError
from tikv_br.formats.columns import SCHEMA
from tikv_br.load import loader
from tikv_br.load.loader import RowSource, made_pairs, open_source

ROWS = [(b"k1", b"v1"), (b"\xff\x00", b""), (b"", b"\n,\"'")]


def pairs(source: RowSource) -> list[tuple[bytes, bytes]]:
    """Return keys and values of all batches, which must be of the schema."""
    found: list[tuple[bytes, bytes]] = []
    for batch in source.batches:
        assert batch.schema == SCHEMA
        found += zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
    return found


def expiries(source: RowSource) -> list[int]:
    """Return the expiry of every row."""
    return [expire_ts for batch in source.batches for expire_ts in batch["expire_ts"].to_pylist()]


def write(path: Path, text: str) -> Path:
    """Write a text file and return it."""
    path.write_text(text)
    return path


def test_json_lines_as_raw_scan_writes_them(tmp_path: Path) -> None:
    """Keys and values in hex, one object a line, empty lines ignored."""
    lines = [json.dumps({"key": key.hex(), "value": value.hex()}) for key, value in ROWS]
    assert pairs(open_source(write(tmp_path / "a.jsonl", "\n\n".join(lines)))) == ROWS


def test_standard_input_is_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file the lines come from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"key": "6b", "value": "76"}\n'))
    assert pairs(open_source(None)) == [(b"k", b"v")]


def test_csv_with_a_large_value(tmp_path: Path) -> None:
    """A value may be larger than the limit that Python's csv has by default."""
    path = write(tmp_path / "a.csv", f"key,value\nk,{'v' * 500_000}\n")
    assert pairs(open_source(path)) == [(b"k", b"v" * 500_000)]


def test_csv_with_text_and_with_hex(tmp_path: Path) -> None:
    """CSV takes text as it is, quoted where needed, or hex on request."""
    path = write(tmp_path / "a.csv", 'value,key\n"a,b\n""c""",k1\n7a,6b\n')
    assert pairs(open_source(path)) == [(b"k1", b'a,b\n"c"'), (b"6b", b"7a")]
    path = write(tmp_path / "b.csv", "key,value\n6b,7a\n")
    assert pairs(open_source(path, "hex")) == [(b"k", b"z")]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string()])
def test_parquet_by_column_names(kind: pa.DataType, tmp_path: Path) -> None:
    """Binary and text columns are taken, others ignored, and the number of rows is known before."""
    values = [b"k1", b"k2"] if kind != pa.string() else ["k1", "k2"]
    table = pa.table({"more": [1, 2], "value": pa.array(values, kind), "key": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert source.expected_rows == 2
    assert pairs(source) == [(b"k1", b"k1"), (b"k2", b"k2")]


def test_expiry_is_absolute_or_from_now(tmp_path: Path) -> None:
    """``expire_ts`` is taken as it is and wins, ``ttl`` counts from now, nothing and 0 mean never; in every form of file."""
    rows = [{"expire_ts": 99}, {"ttl": 50}, {}, {"ttl": 0}, {"expire_ts": 7, "ttl": 50}]
    full = [{"key": "aa", "value": "bb", **row} for row in rows]
    json_file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, full)))
    names = ("key", "value", "expire_ts", "ttl")
    csv_lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in full)]
    csv_file = write(tmp_path / "a.csv", "\n".join(csv_lines))
    table = pa.table({name: pa.array([row.get(name) for row in full]) for name in names})
    pq.write_table(table, tmp_path / "a.parquet")
    now = 1_800_000_000
    for path in (json_file, csv_file, tmp_path / "a.parquet"):
        found = expiries(open_source(path, now=lambda: now))
        assert found[0] == 99
        assert found[1] == now + 50
        assert found[2:] == [0, 0, 7]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"key": "6b", "value": "76"}\n{"key": "6b"', r"a\.jsonl, line 2: invalid JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: invalid JSON"),
        ("a.jsonl", "[1]", r"line 1: not a JSON object"),
        ("a.jsonl", '{"key": "6b"}', r"line 1: no `value`; it has key"),
        ("a.jsonl", "{}", r"line 1: no `key` and no `value`; it has nothing"),
        ("a.csv", "id,name\n1,a\n", r"line 2: no `key` and no `value`; it has id, name"),
        ("a.jsonl", '{"key": 1, "value": "76"}', r"line 1: `key` and `value` must be strings"),
        ("a.jsonl", '{"key": "6g", "value": "76"}', r"line 1: .*not a hex digit"),
        ("a.jsonl", '{"key": "6b", "value": "76", "ttl": -1}', r"line 1: .*number of seconds"),
        ("a.jsonl", '{"key": "6b", "value": "76", "expire_ts": "soon"}', r"line 1: .*soon"),
        ("a.csv", "key,value\nk,v\nk\n", r"a\.csv, line 3: the number of fields"),
        ("a.csv", 'key,value\n"k,v\n', r"a\.csv, line 1: unexpected end"),
        ("a.parquet", "no parquet", r"a\.parquet: not a Parquet file"),
        ("a.txt", "", r"unknown file format"),
    ],
)
def test_wrong_input_is_named_with_its_line(name: str, text: str, problem: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file is a usage error that says where."""
    with pytest.raises(UsageError, match=problem):
        pairs(open_source(write(tmp_path / name, text)))


def test_missing_file_and_columns_are_named(tmp_path: Path) -> None:
    """A path that is not there, and Parquet without key and value, are refused before anything is put."""
    with pytest.raises(UsageError, match="is not a file"):
        open_source(tmp_path / "nowhere.csv")
    pq.write_table(pa.table({"k": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="columns `key` and `value` are required; the file has k"):
        open_source(tmp_path / "a.parquet")


def test_bytes_that_are_no_text_are_named_with_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is read as files are: what is no UTF-8 is wrong input, not a crash."""
    stdin = io.TextIOWrapper(io.BytesIO(b'{"key": "6b", "value": "76"}\n\xff\xfe\n'), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UsageError, match="standard input, line 2: invalid JSON"):
        pairs(open_source(None))


@pytest.mark.parametrize("column", ["key", "value"])
def test_parquet_without_a_key_or_value_is_named(column: str, tmp_path: Path) -> None:
    """A null is neither an empty key nor an empty value."""
    table = pa.table({"key": [b"a", b"b"], "value": [b"1", b"2"]})
    holes = table.set_column(table.column_names.index(column), column, [pa.array([b"x", None])])
    pq.write_table(holes, tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=rf"a\.parquet: column `{column}` has nulls"):
        pairs(open_source(tmp_path / "a.parquet"))


def test_ttl_beyond_the_end_of_time_is_refused(tmp_path: Path) -> None:
    """A TTL whose expiry is no 64-bit number of seconds is wrong input, whatever file says it: it must not wrap around."""
    line = json.dumps({"key": "6b", "value": "76", "ttl": 2**64 - 1})
    with pytest.raises(UsageError, match=r"line 1: .*seconds"):
        expiries(open_source(write(tmp_path / "a.jsonl", line), now=lambda: 1))
    pq.write_table(
        pa.table({"key": [b"k"], "value": [b"v"], "ttl": pa.array([2**64 - 1], pa.uint64())}), tmp_path / "a.parquet"
    )
    with pytest.raises(UsageError, match=r"a\.parquet: .*seconds"):
        expiries(open_source(tmp_path / "a.parquet", now=lambda: 1))


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file comes in batches, none larger than the bound, in the order of its lines."""
    monkeypatch.setattr(loader, "BATCH_ROWS", 10)
    path = write(tmp_path / "a.csv", "key,value\n" + "".join(f"k{n:03},v\n" for n in range(25)))
    batches = list(open_source(path).batches)
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert [key for batch in batches for key in batch["key"].to_pylist()] == [b"k%03d" % n for n in range(25)]


def test_made_pairs_are_as_many_as_asked_for() -> None:
    """Count, size and the sameness for the same seed hold."""
    first, second = (pairs(made_pairs(1000, 33, 5)) for _ in range(2))
    assert first == second
    assert len({key for key, _ in first}) == 1000
    assert {len(value) for _, value in first} == {33}
    assert pairs(made_pairs(1000, 33, 6)) != first
    with pytest.raises(UsageError, match="cannot make"):
        pairs(made_pairs(5, -1, 0))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", [b"key,value", b"k1,v1", b"k2,v2"]),
        ("a.jsonl", [b'{"key":"6b31","value":"7631"}', b'{"key":"6b32","value":"7632"}']),
    ],
)
def test_files_of_other_systems(
    name: str, lines: list[bytes], end: bytes, mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte order mark is no part of the first name, and lines end as on any system; from a pipe, too."""
    data = mark + end.join(lines) + end
    (tmp_path / name).write_bytes(data)
    expected = [(b"k1", b"v1"), (b"k2", b"v2")]
    assert pairs(open_source(tmp_path / name)) == expected
    if name == "a.jsonl":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert pairs(open_source(None)) == expected


def test_utf_16_is_refused(tmp_path: Path) -> None:
    """As Windows writes it: the message says how to convert it."""
    path = tmp_path / "a.csv"
    path.write_bytes("key,value\nk,v\n".encode("utf-16"))
    with pytest.raises(UsageError, match="UTF-16") as failure:
        pairs(open_source(path))
    assert "iconv" in failure.value.hint
