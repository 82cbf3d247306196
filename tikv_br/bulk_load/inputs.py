"""An input that this process reads: its files, the parts that tasks read, and rows that cannot be loaded."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol, cast

import pyarrow as pa

from tikv_br.errors import UsageError
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.text import show_both
from tikv_br.formats.parquet import SourceFile
from tikv_br.formats.sst.source import TailCache
from tikv_br.storage.base import ObjectSource, ObjectStore

PART_BYTES = 64 << 20
"""About how much of an input one task reads, before compression."""
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
    def stream(self) -> Iterator[IO[bytes]]:
        """Open it for reading from the start; decompressed according to its suffix."""
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


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be loaded, and where it is."""

    file: str
    line: int
    """Number of its first line, of the text inside a compressed file; 0 = ``row`` says why no line can be read."""
    problem: str
    key: bytes | None
    """None = it has none."""
    row: bytes
    """The row as it is in the file."""

    def __str__(self) -> str:
        if not self.line:
            return self.row.decode()
        key = f" with key {show_both(self.key)}" if self.key else ""
        return f"{self.file}, line {self.line:,}{key}: {self.problem}"


@dataclass
class BadRows:
    """Rows that cannot be loaded: how many of each problem, and the first ones."""

    most: float
    """Maximum number of examples."""
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    def add(self, rows: Sequence[BadRow]) -> None:
        """Count rows, and keep the first ones."""
        self.problems.update(row.problem for row in rows)
        self.examples += rows[: int(min(self.most - len(self.examples), len(rows)))]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a block, with the columns that are used."""

    table: pa.Table
    bad: Sequence[BadRow] = ()
    """Rows that are not in the table."""
    locate: Callable[[Sequence[int], str], list[BadRow]] | None = None
    """Finds rows of the table in the file, as bad rows with that problem; None = its rows have no lines."""


class InputPart(Protocol):
    """A part of an input that one task reads."""

    @property
    def file(self) -> InputFile:
        """The file that it is in."""

    @property
    def tasks(self) -> int:
        """How many threads may parse its blocks at once."""

    def blocks(self) -> Iterator[Callable[[], Rows]]:
        """Yield functions that parse one block each, in any thread.

        Raises `UsageError`, `StorageError`.
        """


@dataclass(frozen=True, slots=True)
class FileInput:
    """An input that this process can read."""

    parts: tuple[InputPart, ...]
    schema: pa.Schema
    """Schema of the columns that are used."""
    columns: tuple[str, ...]
    """All known columns."""
    files: tuple[InputFile, ...] = ()
    hidden: int = 0
    """Number of files that are left out, because a name on their path begins with ``_`` or ``.``."""
    encoding: str = "raw"
    """Notation of keys and values that are text."""


class reading:  # noqa: N801 - used as a function
    """Names the file of which something cannot be read. Raises `UsageError`."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, FormatError, OSError, EOFError, zlib.error)):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"cannot read {self._file.name} of the input: {reason}",
                hint="Check that the file is complete and has the format of the input, or remove it from the folder.",
            ) from None
