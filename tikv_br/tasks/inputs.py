"""An input of Spark SQL, and its columns as Spark's expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    order_column: str = ""
    """Column that decides between rows with the same key: the largest value counts; ``""`` = no order."""
    value_encoding: Literal["json", "avro"] = "json"
    """Encoding of a struct in the value column."""
    format: str = ""
    """Name of Spark's format; ``""`` = by the suffix of the path."""
    reader_options: tuple[tuple[str, str], ...] = ()
    """Options of Spark's reader."""

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
        from pyspark.sql import functions

        key = _bytes_of(frame, "--key-column", source.key_column, is_key=True)
        if source.value_encoding == "avro":
            value = _avro_of(frame, source.value_column)
        else:
            value = _bytes_of(frame, "--value-column", source.value_column, is_key=False)
        ttl = functions.lit(0).cast("bigint")
        problem = (
            functions.when(key.isNull(), functions.lit(NULL_KEY))
            .when(functions.length(key) == 0, functions.lit(EMPTY_KEY))
            .when(value.isNull(), functions.lit(NULL_VALUE))
        )
        if source.ttl_column:
            ttl = _ttl(frame, source.ttl_column)
            problem = problem.when(ttl.isNull() | (ttl <= 0), functions.lit(BAD_TTL))
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


def missing_column(flag: str, name: str, columns: Sequence[str]) -> UsageError:
    """The error for a column that an input does not have, or more than once."""
    problem = "has more than one column" if name in columns else "has no column"
    return UsageError(f"{flag}: the input {problem} {name!r}", hint=f"Its columns are: {', '.join(columns) or 'none'}.")


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


def _ttl(frame: DataFrame, name: str) -> Column:
    """The TTL column as bigint; null for text that is no integer. Raises `UsageError` for another type."""
    from pyspark.sql import types

    column, kind = _column(frame, "--ttl-column", name)
    if isinstance(kind, types.StringType):
        return column.try_cast("bigint")
    if isinstance(kind, (types.ByteType, types.ShortType, types.IntegerType, types.LongType)):
        return column.cast("bigint")
    raise UsageError(
        f"--ttl-column: column {name!r} has type {kind.simpleString()}, not an integer",
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
