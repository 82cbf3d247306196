"""An input of Spark SQL, and its columns as Spark's expressions."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import GROUP
from tikv_br.formats.limits import RowLimits

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


_FORMATS = {
    ".parquet": "parquet",
    ".orc": "orc",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""Spark's formats by the suffix of a path."""
NULL_KEY = "null key"
EMPTY_KEY = "empty key"
NULL_VALUE = "null value"
LONG_KEY = "key longer than stores accept"
LARGE_ROW = "row larger than stores accept"
BAD_TTL = "TTL is not a positive integer"
NOT_TEXT = "text that is not valid in its encoding"
OTHER_FIELDS = "another number of fields than the header"
NOT_JSON = "a line that is not one JSON object"
REPEATED_NAME = "a name twice in the JSON object"
OTHER_TYPE = "JSON of another type than the first row, or a number that does not fit"
UNREADABLE = "a file that cannot be read"
"""No problem of a row: what is left of the file is unknown."""
TTL_TEXT = r"\A[0-9]{1,18}\z"
"""Text that is a number of seconds."""


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """Dialect of CSV; by default RFC 4180. Raises `UsageError`."""

    delimiter: str = ","
    quote: str = '"'
    """``""`` = quotes are plain text."""
    escape: str = ""
    """Sign that makes the next one plain text, in addition to doubled quotes; ``""`` = none."""
    encoding: str = "utf-8"
    null: str = ""
    """Text of a field without quotes that is null."""

    def __post_init__(self) -> None:
        given = (("--csv-delimiter", self.delimiter), ("--csv-quote", self.quote), ("--csv-escape", self.escape))
        for flag, sign in given:
            if len(sign) > 1 or not sign.isascii() or sign in set("\r\n\0") or (not sign and flag == "--csv-delimiter"):
                raise UsageError(
                    f"{flag}: {sign!r} is not one sign of ASCII",
                    hint="Pass one sign, or --executor spark and the option of Spark's reader with --input-option.",
                )
        signs = [sign for _, sign in given if sign]
        if len(set(signs)) < len(signs):
            raise UsageError("--csv-delimiter, --csv-quote and --csv-escape must differ")
        try:
            codecs.getincrementaldecoder(self.encoding)
            "a".encode(self.encoding)
        except LookupError:
            raise UsageError(
                f"--csv-encoding: {self.encoding!r} is not a known encoding",
                hint="Pass for example utf-8, latin-1, cp1252, utf-16 or gb18030.",
            ) from None

    @property
    def is_utf8(self) -> bool:
        """Return whether text need not be converted."""
        return codecs.lookup(self.encoding).name == "utf-8"

    def without_escapes(self, data: bytes) -> bytes:
        """The same text with other signs in the place of escapes, so that what is left of quotes and line breaks has its meaning."""
        if not self.escape or self.escape.encode() not in data:
            return data
        return re.sub(re.escape(self.escape.encode()) + rb".", b"__", data, flags=re.DOTALL)


DEFAULT_LIMITS = RowLimits()


@dataclass(frozen=True, slots=True)
class Input:
    """An input that Spark reads, and the columns to use."""

    path: str
    """A path, folder or glob as Spark takes it."""
    key_column: str
    value_column: str
    ttl_column: str = ""
    """Column with the TTL in seconds; ``""`` = none."""
    expiry_column: str = field(default="", repr=False)
    """Column with the expiry in seconds since the epoch; ``""`` = none."""
    order_column: str = ""
    """Column that decides between rows with the same key: the largest value counts; ``""`` = no order."""
    value_encoding: Literal["json", "avro"] = "json"
    """Encoding of a struct in the value column."""
    format: str = ""
    """Name of Spark's format; ``""`` = by the suffix of the path."""
    reader_options: tuple[tuple[str, str], ...] = ()
    """Options of Spark's reader. With them it reads the input, also CSV and JSON lines."""
    csv: CsvDialect = field(default=CsvDialect(), repr=False)
    encoding: Literal["raw", "hex", "escaped"] | None = field(default=None, repr=False)
    """Notation of keys and values in CSV and JSON lines; None = as the export that the input is records it, else raw."""

    @property
    def used_columns(self) -> list[tuple[str, str]]:
        """Return flags and names of the columns that are used."""
        given = [
            ("--key-column", self.key_column),
            ("--value-column", self.value_column),
            ("--ttl-column", self.ttl_column),
            ("--expiry-column", self.expiry_column),
            ("--order-column", self.order_column),
        ]
        return [(flag, name) for flag, name in given if name]

    @property
    def expiry(self) -> tuple[str, str]:
        """Return flag and name of the column with TTLs or expiries; empty = none."""
        return next((each for each in self.used_columns if each[0] in {"--ttl-column", "--expiry-column"}), ("", ""))

    @property
    def is_text(self) -> bool:
        """Return whether our reader of CSV or JSON lines is for it, also in tasks of Spark."""
        return self.spark_format in {"csv", "json"} and not self.reader_options and self.value_encoding == "json"

    @property
    def spark_format(self) -> str:
        """Return Spark's name of the format. Raises `UsageError` if neither the option nor the path determines it."""
        if self.format:
            return "json" if self.format == "jsonl" else self.format
        suffixes = [suffix.lower() for suffix in PurePosixPath(self.path).suffixes]
        found = next((_FORMATS[suffix] for suffix in reversed(suffixes) if suffix in _FORMATS), "")
        if not found:
            raise UsageError(
                f"the format of the input {self.path} is unknown",
                hint="Pass --input-format, for example parquet, csv, jsonl or orc.",
            )
        return found


@dataclass(frozen=True, slots=True)
class InputColumns:
    """Key, value, TTL and problem of an input as Spark's expressions."""

    key: Column
    value: Column
    ttl: Column
    problem: Column

    @classmethod
    def of(cls, frame: DataFrame, source: Input, limits: RowLimits = DEFAULT_LIMITS) -> InputColumns:
        """Build the expressions for an input. Raises `UsageError`."""
        from pyspark.sql import functions, types

        key = _bytes_of(frame, "--key-column", source.key_column, is_key=True)
        if source.value_encoding == "avro":
            value = _avro_of(frame, source.value_column)
        else:
            _, kind = _column(frame, "--value-column", source.value_column)
            if source.spark_format == "json" and not isinstance(kind, types.AtomicType):
                raise UsageError(
                    "--value-column: Spark would write the JSON of the values anew, with other numbers",
                    hint="Leave out --input-option, and pass a local path or a URL of S3, GCS or Azure as for --storage.",
                )
            value = _bytes_of(frame, "--value-column", source.value_column, is_key=False)
        ttl = functions.lit(0).cast("bigint")
        problem = (
            functions.when(key.isNull(), functions.lit(NULL_KEY))
            .when(functions.length(key) == 0, functions.lit(EMPTY_KEY))
            .when(value.isNull(), functions.lit(NULL_VALUE))
        )
        if source.spark_format in {"csv", "json"}:  # Spark's readers replace what is not valid
            mark = functions.lit("\ufffd".encode())
            problem = problem.when(
                functions.contains(key, mark) | functions.contains(value, mark), functions.lit(NOT_TEXT)
            )
        if source.expiry[1]:
            ttl, is_null = _ttl(frame, *source.expiry)
            problem = problem.when(~is_null & (ttl.isNull() | (ttl <= 0)), functions.lit(BAD_TTL))
            ttl = functions.coalesce(ttl, functions.lit(0))
        size = functions.length(key)
        problem = problem.when(size > limits.key, functions.lit(LONG_KEY)).when(
            size + functions.floor(size / GROUP) + functions.length(value) > limits.row, functions.lit(LARGE_ROW)
        )
        return cls(key, value, ttl, problem)


def _column(frame: DataFrame, flag: str, name: str) -> tuple[Column, DataType]:
    """A column and its type. Raises `UsageError` if there is none, or more than one."""
    found = [field.dataType for field in frame.schema.fields if field.name == name]
    if len(found) != 1:
        raise missing_column(flag, name, frame.columns)
    return frame["`" + name.replace("`", "``") + "`"], found[0]


def missing_column(flag: str, name: str, columns: Sequence[str], file: str = "") -> UsageError:
    """The error for a column that an input or a file of it does not have, or more than once."""
    problem = "has more than one column" if name in columns else "has no column"
    return UsageError(
        f"{flag}: {file or 'the input'} {problem} {name!r}", hint=f"Its columns are: {', '.join(columns) or 'none'}."
    )


def unmapped_type(flag: str, name: str, kind: str, *, is_key: bool) -> UsageError:
    """The error for a column of a type without a mapping to bytes; `kind` is Spark's name of the type."""
    allowed = "binary, string or an integer" if is_key else "binary, string, an integer, struct, array or map"
    return UsageError(
        f"{flag}: column {name!r} has type {kind}, which has no mapping to bytes",
        hint=f"The column must be {allowed}: convert it in the input.",
    )


def _bytes_of(frame: DataFrame, flag: str, name: str, *, is_key: bool) -> Column:
    """A column as binary. Raises `UsageError` for a type without a mapping."""
    from pyspark.sql import functions, types

    column, kind = _column(frame, flag, name)
    if isinstance(kind, types.BinaryType):
        return column
    if isinstance(kind, types.StringType):
        return column.cast("binary")
    if isinstance(kind, (types.ByteType, types.ShortType, types.IntegerType, types.LongType)):
        # The sign bit flipped: so the bytes sort as the numbers do.
        flipped = column.cast("bigint").bitwiseXOR(functions.lit(-(1 << 63)).cast("bigint"))
        return functions.unhex(functions.lpad(functions.hex(flipped), 16, "0"))
    if isinstance(kind, (types.StructType, types.ArrayType, types.MapType)) and not is_key:
        return functions.to_json(column, {"ignoreNullFields": "false"}).cast("binary")
    raise unmapped_type(flag, name, kind.simpleString(), is_key=is_key)


def _avro_of(frame: DataFrame, name: str) -> Column:
    """A struct column as binary Avro of a record with its fields. Raises `UsageError` for another type."""
    from pyspark.sql import functions, types

    column, kind = _column(frame, "--value-column", name)
    if not isinstance(kind, types.StructType):
        raise UsageError(
            f"--value-encoding avro: column {name!r} has type {kind.simpleString()}, not struct",
            hint="Leave out --value-encoding, or make a struct of the columns in the input.",
        )
    record = functions.struct(*(column.getField(field.name).alias(field.name) for field in kind.fields))
    # Of the struct itself Avro would make a union with null, as it may be null; a record built of its fields is never null.
    return functions.when(column.isNotNull(), functions.call_function("to_avro", record))


def _ttl(frame: DataFrame, flag: str, name: str) -> tuple[Column, Column]:
    """A column of seconds as bigint, null for text that is no integer, and whether it is null. Raises `UsageError` for another type."""
    from pyspark.sql import functions, types

    column, kind = _column(frame, flag, name)
    if isinstance(kind, types.StringType):
        return functions.when(column.rlike(TTL_TEXT), column.try_cast("bigint")), column.isNull()
    if isinstance(kind, (types.ByteType, types.ShortType, types.IntegerType, types.LongType)) or (
        isinstance(kind, types.DecimalType) and kind.scale == 0  # unsigned 64-bit integers of Parquet
    ):
        return column.try_cast("bigint"), column.isNull()
    raise UsageError(
        f"{flag}: column {name!r} has type {kind.simpleString()}, not an integer",
        hint="The column must have whole seconds.",
    )


def rank_of(frame: DataFrame, name: str) -> Column:
    """The order column. Raises `UsageError` for a type that has no order."""
    from pyspark.sql import types

    column, kind = _column(frame, "--order-column", name)
    if not isinstance(kind, types.AtomicType):
        raise UsageError(
            f"--order-column: column {name!r} has type {kind.simpleString()}, which has no order",
            hint="Pass a column with numbers, times or text.",
        )
    return column
