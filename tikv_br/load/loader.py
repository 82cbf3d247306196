"""Loads pairs into a cluster with concurrent RawBatchPut requests, from files or a generator.

A source yields batches of `tikv_br.formats.columns.SCHEMA`.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tikv_br.cluster.clock import no_clock
from tikv_br.errors import UsageError
from tikv_br.formats import columns
from tikv_br.formats.errors import FormatError, InvalidKeyText
from tikv_br.formats.keys.text import parse_key, show_key
from tikv_br.formats.loadgen import generate
from tikv_br.formats.numbers import parse_decimal
from tikv_br.formats.order import by_key
from tikv_br.formats.rows import unexpired
from tikv_br.progress_events import Reporter, TasksProgress, silent

if TYPE_CHECKING:
    from tikv_br.cluster.puts import ColumnWriter

BATCH_ROWS = 16_384
_MAX_U64 = 2**64 - 1
_MAX_FIELD = 2**31 - 1
"""Characters of a field of CSV: more than the largest value of a store takes in any format."""
_MAX_TTL = 2**63  # with the present time added still 64 bits
_UTF_16 = {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}
Fields = Mapping[str, object]
Rows = Iterator[tuple[int, Fields]]  # the number of the line, its fields


@dataclass(frozen=True, slots=True)
class RowSource:
    """Batches of records, and how many rows they will have where that is known (0 otherwise)."""

    batches: Iterable[pa.RecordBatch]
    expected_rows: int = 0


def made_pairs(count: int, value_size: int, seed: int) -> RowSource:
    """Return ``count`` made pairs; the same for the same seed. Raises `UsageError`, when read, for sizes that cannot be."""
    return RowSource(_made(count, value_size, seed), count)


def _made(count: int, value_size: int, seed: int) -> Iterator[pa.RecordBatch]:
    try:
        yield from generate(count, value_size, seed, BATCH_ROWS)
    except FormatError as error:
        raise UsageError(str(error)) from None


def open_source(path: Path | None, form: str | None = None, now: Callable[[], int] = no_clock) -> RowSource:
    """Return the pairs of a file by its suffix: .jsonl, .ndjson or .json, .csv, .parquet; None is JSON lines from stdin.

    Fields are ``key`` and ``value``, and if present ``expire_ts`` (absolute seconds, 0: never) or ``ttl`` (seconds from ``now``).
    Text forms (``form``: raw, hex or escaped) default to hex in JSON, as ``raw scan`` writes, and raw in CSV.
    Raises `UsageError` for a file that cannot be read, here or, with its line, while reading.
    """
    if path is None:
        return RowSource(_batches(_json_rows(_stdin()), "standard input", form or "hex", now))
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".json":
            return RowSource(_batches(_file_rows(path, _json_rows), str(path), form or "hex", now))
        case ".csv":
            return RowSource(_batches(_file_rows(path, _csv_rows), str(path), form or "raw", now))
        case ".parquet":
            return _parquet(path, now)
    raise UsageError(f"{path}: unknown file format", hint="Use a file named .jsonl, .ndjson, .json, .csv or .parquet.")


def _stdin() -> IO[str]:
    """Return standard input, read as files are."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return sys.stdin


def _file_rows(path: Path, rows: Callable[[IO[str]], Rows]) -> Rows:
    try:
        with path.open("rb") as start:
            if start.read(2) in _UTF_16:
                raise UsageError(f"{path} is in UTF-16", hint=f"Convert it: iconv -f UTF-16 -t UTF-8 {path}.")
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield from rows(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _json_rows(file: Iterable[str]) -> Rows:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _LineError(number, f"invalid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise _LineError(number, "not a JSON object")
        yield number, fields


def _csv_rows(file: Iterable[str]) -> Rows:
    csv.field_size_limit(_MAX_FIELD)  # of the process; values of a store may be larger than csv's default
    reader = csv.DictReader(file, strict=True)
    try:
        for fields in reader:
            if None in fields or None in fields.values():
                raise _LineError(reader.line_num, "the number of fields differs from the header's")
            yield reader.line_num, fields
    except csv.Error as error:
        raise _LineError(reader.line_num, str(error)) from None


class _LineError(Exception):
    """Error in a line; `_batches` adds the name of the file."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number


HINT = (
    "Rows have `key`, `value` and optionally `ttl` or `expire_ts`. For other names of columns use "
    "`tikv-br load raw --mode put --input FILE --key-column NAME --value-column NAME`."
)


def _batches(rows: Rows, name: str, form: str, now: Callable[[], int]) -> Iterator[pa.RecordBatch]:
    """Yield records of text rows. Raises `UsageError` with file and line."""
    try:
        while batch := [_record(number, fields, form, now) for number, fields in islice(rows, BATCH_ROWS)]:
            keys, values, expiries = zip(*batch, strict=True)
            expire_ts = np.array(expiries, np.uint64)
            yield columns.records(columns.from_list(keys), columns.from_list(values), expire_ts=expire_ts)
    except _LineError as error:
        raise UsageError(f"{name}, line {error.number}: {error}", hint=HINT) from None


def _record(number: int, fields: Fields, form: str, now: Callable[[], int]) -> tuple[bytes, bytes, int]:
    if missing := [column for column in ("key", "value") if fields.get(column) is None]:
        raise _LineError(
            number,
            f"no {' and no '.join(f'`{column}`' for column in missing)}; it has {', '.join(fields) or 'nothing'}",
        )
    texts = [fields["key"], fields["value"]]
    if not all(isinstance(text, str) for text in texts):
        raise _LineError(number, "`key` and `value` must be strings")
    try:
        key, value = (parse_key(str(text), form) for text in texts)
        return key, value, _expiry(fields, now)
    except (InvalidKeyText, ValueError) as error:
        raise _LineError(number, str(error)) from None


def _expiry(fields: Fields, now: Callable[[], int]) -> int:
    """Return the absolute expiry that the fields say, 0 for none. Raises ValueError."""
    expire_ts, ttl = _seconds(fields, "expire_ts", _MAX_U64), _seconds(fields, "ttl", _MAX_TTL)
    return expire_ts or (now() + ttl if ttl else 0)


def _seconds(fields: Fields, name: str, most: int) -> int:
    text = str(fields.get(name) or 0)
    if (number := parse_decimal(text, most)) is None:
        raise ValueError(f"`{name}` {text!r} is not a number of seconds (0 = never)")
    return number


def _parquet(path: Path, now: Callable[[], int]) -> RowSource:
    import pyarrow.parquet as pq

    from tikv_br.formats.parquet import bounded_batches

    try:
        opened = pa.OSFile(str(path))  # closed with the last reference
        file = pq.ParquetFile(opened)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    if not {"key", "value"} <= set(names):
        raise UsageError(f"{path}: columns `key` and `value` are required; the file has {', '.join(names)}", hint=HINT)
    wanted = [name for name in ("key", "value", "expire_ts", "ttl") if name in names]
    return RowSource(_parquet_batches(bounded_batches(opened, file, wanted), str(path), now), file.metadata.num_rows)


def _parquet_batches(found: Iterable[pa.RecordBatch], name: str, now: Callable[[], int]) -> Iterator[pa.RecordBatch]:
    try:
        for batch in found:
            yield to_records(batch, now)
    except (pa.ArrowException, FormatError) as error:
        raise UsageError(f"{name}: {error}") from None


def to_records(batch: pa.RecordBatch, now: Callable[[], int]) -> pa.RecordBatch:
    """Pairs of the columns ``key``, ``value`` and, if there, ``expire_ts`` and ``ttl``. Raises `FormatError`, `pyarrow.ArrowException`."""
    keys, values = (_parquet_bytes(batch, part) for part in ("key", "value"))
    return columns.records(keys, values, expire_ts=_parquet_expiry(batch, now))


def _parquet_bytes(batch: pa.RecordBatch, column: str) -> pa.LargeBinaryArray:
    found = batch.column(column)
    if found.null_count:
        raise FormatError(f"column `{column}` has nulls")
    return found.cast(pa.large_binary())


def _parquet_expiry(batch: pa.RecordBatch, now: Callable[[], int]) -> columns.Numbers:
    """Return ``expire_ts`` of each row, from that column or from ``ttl``; nulls are 0. Raises `FormatError`."""
    expire_ts = np.zeros(len(batch), np.uint64)
    if "ttl" in batch.schema.names:
        ttl = batch.column("ttl").cast(pa.uint64()).fill_null(0).to_numpy(zero_copy_only=False)
        if (ttl > _MAX_TTL).any():
            raise FormatError(f"a `ttl` of {ttl.max()} is not a number of seconds (0 = never)")
        expire_ts = np.where(ttl > 0, ttl + np.uint64(now()), 0).astype(np.uint64)
    if "expire_ts" in batch.schema.names:
        given = batch.column("expire_ts").cast(pa.uint64()).fill_null(0).to_numpy(zero_copy_only=False)
        expire_ts = np.where(given > 0, given, expire_ts).astype(np.uint64)
    return expire_ts


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Pairs put, bytes of user keys and values, pairs omitted because they had expired, seconds, and bytes per second."""

    total_kvs: int
    total_bytes: int
    expired_kvs: int
    seconds: float
    average_speed: int


def load_pairs(
    client: ColumnWriter, source: RowSource, *, ttl: int = 0, concurrency: int = 8, reporter: Reporter = silent
) -> LoadSummary:
    """Put every record of ``source``, in order of its batches: of equal keys the last wins.

    Records without expiry get ``ttl``. Parts of one batch are put in parallel, and a batch is done before the next
    begins. Raises what the client raises; then some pairs are written and others not. Raises `UsageError` for
    tombstones, which cannot be put.
    """

    def put(rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that were left out."""
        left_out = client.put_rows(rows, ttl)
        return rows.filter(pa.array(left_out)) if left_out.any() else rows.slice(0, 0)

    begin = time.monotonic()
    kvs = size = expired = 0
    with ThreadPoolExecutor(concurrency, thread_name_prefix="put") as pool:
        for batch in source.batches:
            live = _live(batch, client.now())
            rows = by_key(live)
            parts = columns.slices(rows, max(1, -(-rows.num_rows // concurrency)))
            left_out = list(pool.map(put, parts))  # raises what one of them raises
            left_out_kvs = sum(part.num_rows for part in left_out)
            kvs += rows.num_rows - left_out_kvs
            size += int(columns.row_sizes(rows).sum()) - sum(int(columns.row_sizes(part).sum()) for part in left_out)
            expired += batch.num_rows - live.num_rows + left_out_kvs
            seconds = time.monotonic() - begin
            fraction = min(kvs / source.expected_rows, 1.0) if source.expected_rows else 0.0
            reporter(TasksProgress(0, 0, size, kvs, fraction, seconds))
    seconds = time.monotonic() - begin
    return LoadSummary(kvs, size, expired, round(seconds, 3), round(size / seconds) if seconds else 0)


def _live(batch: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """The rows that have not expired. Raises `UsageError` for a tombstone."""
    deleted = columns.flags(batch["deleted"])
    if deleted.any():
        key = batch["key"][int(deleted.argmax())].as_py()
        raise UsageError(f"cannot load key {show_key(key)}: it is a tombstone, not a pair")
    return unexpired(batch, now)
