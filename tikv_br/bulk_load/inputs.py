"""An input that this process reads: its files, and the parts that tasks read."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, cast

import pyarrow as pa

from tikv_br.errors import UsageError
from tikv_br.formats.parquet import SourceFile
from tikv_br.formats.sst.source import TailCache
from tikv_br.storage.base import ObjectSource, ObjectStore

PART_BYTES = 64 << 20
"""About how much of an input one task reads, before compression."""
BLOCK_BYTES = 16 << 20
"""Size of text that is parsed in one piece."""
BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 4 << 20


class NeedsSpark(UsageError):
    """Only Spark can read the input; the message has the reason."""

    default_hint = "Leave out --executor, or pass --executor spark."


@dataclass(frozen=True, slots=True)
class InputFile:
    """File of an input."""

    store: ObjectStore | None
    """None = a local file, whose path is its name."""
    name: str
    size: int

    def open(self) -> pa.NativeFile:
        """Open it for Arrow. Raises `StorageError`."""
        return pa.OSFile(self.name) if self.store is None else pa.PythonFile(self._source())

    @contextlib.contextmanager
    def lines(self) -> Iterator[IO[bytes]]:
        """Open it for reading lines; decompressed according to its suffix."""
        raw: io.RawIOBase = io.FileIO(self.name) if self.store is None else self._source()
        with io.BufferedReader(raw, _BUFFER_BYTES) as opened:
            if not self.is_compressed:
                yield opened
                return
            with gzip.open(opened) as text:
                yield cast("IO[bytes]", text)

    @property
    def is_compressed(self) -> bool:
        """Return whether it can only be read from the start."""
        return self.name.lower().endswith(".gz")

    def _source(self) -> SourceFile:
        return SourceFile(TailCache(ObjectSource(cast("ObjectStore", self.store), self.name, b"")))


class InputPart(Protocol):
    """A part of an input that one task reads."""

    @property
    def file(self) -> InputFile:
        """The file that it is in."""

    def read(self) -> Iterator[pa.Table]:
        """Yield its rows, with the columns that are used.

        Raises `NeedsSpark`, `StorageError`, `pyarrow.ArrowException`.
        """


@dataclass(frozen=True, slots=True)
class FileInput:
    """An input that this process can read."""

    parts: tuple[InputPart, ...]
    schema: pa.Schema
    """Schema of the columns that are used."""
    columns: tuple[str, ...]
    """All known columns."""


class for_spark:  # noqa: N801 - used as a function
    """Leaves to Spark what Arrow refuses: its message is the one that the documents describe."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error)):
            raise NeedsSpark(f"pyarrow cannot read it: {str(error).splitlines()[0]}") from None


def check_column_names(all_names: Sequence[str]) -> None:
    """Spark takes names without regard to case."""
    if len({name.casefold() for name in all_names}) < len(all_names) or not all(all_names):
        raise NeedsSpark("names of its columns are empty or repeated")
