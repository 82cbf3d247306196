"""Writes the files of this folder with one tool: ``python tests/data/foreign/write.py TOOL`` in an environment that has it.

What is expected of them is in ``expected.json``, which this script does not write.
"""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HARD = {
    "user:1": '{"name": "Ann", "n": 1}',
    'comma, quote"': 'a "quoted" word',
    "two\nlines": "first\r\nsecond\n",
    "ünï€\U0001f600": "back\\slash\\",
    " blanks ": " v\t",
}
EMPTY = {**HARD, "empty": ""}
TTL = {"id": ["a", "b", "c"], "v": ["1", "2", "3"], "t": [5, None, 70000]}
BYTES = {"id": [b"\xff\x00", b"\x00", b"k"], "v": [b"", b"\x80\xfe", b'"\n']}
NESTED = {"id": ["a", "b"], "v": [{"price": 1.1, "n": 2**53 + 1, "s": 'q"\u00e9'}, {"price": 2.0, "n": -1, "s": None}]}
WESTERN = {"a": "naïve café", "b": "x;y\tz"}


def columns(rows: dict[str, str]) -> dict[str, list[str]]:
    """As columns of a table."""
    return {"id": list(rows), "v": list(rows.values())}


def by_csv(module: Any) -> None:  # noqa: ANN401
    """Python's csv and json."""
    for name, rows, quoting in (("hard.csv", HARD, module.QUOTE_MINIMAL), ("empty.csv", EMPTY, module.QUOTE_ALL)):
        with (HERE / name.replace(".", ".python.")).open("w", encoding="utf-8", newline="") as file:
            module.writer(file, quoting=quoting).writerows([("id", "v"), *rows.items()])
    lines = [json.dumps({"id": key, "v": value}) for key, value in EMPTY.items()]
    (HERE / "empty.python.jsonl").write_text("\n".join(lines) + "\n")


def by_pandas(pandas: Any) -> None:  # noqa: ANN401
    """Of pandas."""
    hard, empty, western = (pandas.DataFrame(columns(rows)) for rows in (HARD, EMPTY, WESTERN))
    hard.to_csv(HERE / "hard.pandas.csv", index=False)
    hard.to_csv(HERE / "hard.bom.csv", index=False, encoding="utf-8-sig", lineterminator="\r\n")
    hard.to_csv(HERE / "hard.pandas.csv.gz", index=False, compression={"method": "gzip", "mtime": 1})
    empty.to_csv(HERE / "empty.pandas.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    empty.to_json(HERE / "empty.pandas.jsonl", orient="records", lines=True)
    empty.to_parquet(HERE / "empty.pandas.parquet")
    empty.astype("category").to_parquet(HERE / "empty.categories.parquet")
    western.to_csv(HERE / "latin.pandas.csv", index=False, encoding="latin-1")
    western.to_csv(HERE / "utf16.pandas.csv", index=False, encoding="utf-16")
    escaped = pandas.DataFrame({"id": ["a", "b"], "v": ["x,y", 'q"\\']})
    escaped.to_csv(HERE / "escaped.pandas.csv", index=False, quoting=csv.QUOTE_NONE, escapechar="\\")
    western.to_csv(HERE / "apostrophes.pandas.csv", index=False, sep=";", quotechar="'")
    ttl = pandas.DataFrame(TTL).astype({"t": "Int64"})
    ttl.to_csv(HERE / "ttl.pandas.csv", index=False)
    ttl.to_parquet(HERE / "ttl.pandas.parquet")


def by_polars(polars: Any) -> None:  # noqa: ANN401
    """Of polars."""
    empty = polars.DataFrame(columns(EMPTY))
    empty.write_csv(HERE / "empty.polars.csv")
    empty.write_ndjson(HERE / "empty.polars.jsonl")
    empty.write_parquet(HERE / "empty.polars.parquet")
    polars.DataFrame(columns(WESTERN)).write_csv(HERE / "tabs.polars.csv", separator="\t")
    polars.DataFrame(BYTES).write_parquet(HERE / "bytes.polars.parquet")
    polars.DataFrame(NESTED).write_ndjson(HERE / "nested_polars.polars.jsonl")
    ttl = polars.DataFrame(TTL)
    ttl.write_csv(HERE / "ttl.polars.csv")
    ttl.write_parquet(HERE / "ttl.polars.parquet")


def by_duckdb(duckdb: Any) -> None:  # noqa: ANN401
    """DuckDB."""
    base = duckdb.connect()
    tables: dict[str, Any] = {"empty": columns(EMPTY), "western": columns(WESTERN), "ttl": TTL, "bytes": BYTES}
    for name, table in tables.items():
        rows = list(zip(*table.values(), strict=True))
        kinds = {"ttl": "id VARCHAR, v VARCHAR, t INTEGER", "bytes": "id BLOB, v BLOB"}
        base.execute(f"CREATE TABLE {name} ({kinds.get(name, 'id VARCHAR, v VARCHAR')})")
        base.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(table))})", rows)
    base.execute(
        """CREATE TABLE nested AS SELECT 'a' AS id, {'price': 1.10, 'n': 9007199254740993, 'l': [1, 2]} AS v"""
    )
    for source, target, how in (
        ("empty", "empty.duckdb.csv", "HEADER"),
        ("empty", "empty.duckdb.jsonl", "FORMAT json"),
        ("empty", "empty.duckdb.parquet", "FORMAT parquet"),
        ("western", "semicolons.duckdb.csv", "HEADER, DELIMITER ';'"),
        ("ttl", "ttl.duckdb.csv", "HEADER"),
        ("ttl", "ttl.duckdb.parquet", "FORMAT parquet"),
        ("ttl", "nulls.duckdb.csv", "HEADER, NULLSTR '\\N'"),
        ("bytes", "bytes.duckdb.parquet", "FORMAT parquet"),
        ("nested", "nested_duckdb.duckdb.jsonl", "FORMAT json"),
    ):
        base.execute(f"COPY {source} TO '{HERE / target}' ({how})")


def by_pyarrow(arrow: Any) -> None:  # noqa: ANN401
    """Apache Arrow."""
    importlib.import_module("pyarrow.parquet")
    arrow_csv = importlib.import_module("pyarrow.csv")
    arrow_csv.write_csv(arrow.table(columns(EMPTY)), HERE / "empty.pyarrow.csv")
    arrow.parquet.write_table(arrow.table(columns(EMPTY)), HERE / "empty.pyarrow.parquet", compression="zstd")
    arrow.parquet.write_table(arrow.table(BYTES), HERE / "bytes.pyarrow.parquet", row_group_size=1)
    arrow_csv.write_csv(arrow.table(TTL), HERE / "ttl.pyarrow.csv")


def by_pyspark(pyspark: Any) -> None:  # noqa: ANN401
    """Spark."""
    session = importlib.import_module("pyspark.sql").SparkSession.builder.master("local[1]").getOrCreate()
    empty = session.createDataFrame(list(EMPTY.items()), "id string, v string")
    ttl = session.createDataFrame(list(zip(*TTL.values(), strict=True)), "id string, v string, t int")
    quotes = session.createDataFrame([(key, HARD[key]) for key in list(HARD)[:2]], "id string, v string")
    blanks = {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
    for frame, target, form, options in (
        (empty, "empty.spark.csv", "csv", {"header": "true", "escape": '"', **blanks}),
        (empty, "empty.spark.jsonl", "json", {}),
        (empty, "empty.spark.parquet", "parquet", {}),
        (ttl, "ttl.spark.csv", "csv", {"header": "true"}),
        (ttl, "ttl.spark.parquet", "parquet", {}),
        (quotes, "backslashes.spark.csv", "csv", {"header": "true"}),
    ):
        frame.coalesce(1).write.mode("overwrite").options(**options).format(form).save(str(HERE / "out"))
        shutil.move(next((HERE / "out").glob("part-*")), HERE / target)
    shutil.rmtree(HERE / "out")
    del pyspark
    session.stop()


if __name__ == "__main__":
    for tool in sys.argv[1:]:
        found = importlib.import_module(tool)
        globals()[f"by_{tool}"](found)
        sys.stdout.write(f"{tool} {getattr(found, '__version__', sys.version.split()[0])}\n")
