"""Sinks that write a change log as JSON lines, to a file or to a stream.

A line is ``{"op": "put", "key": HEX, "value": HEX, "expire_ts": S, "ts": TSO}`` or ``{"op": "delete", "key": HEX,
"ts": TSO}``; ``expire_ts`` is omitted if it is 0. After a restart some lines are duplicates.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tikv_br.errors import OutputClosed, StorageFull, StorageReadOnly
from tikv_br.incremental.sinks.base import Sink
from tikv_br.storage.local import Hints, storage_errors, sync_directory

if TYPE_CHECKING:
    import pyarrow as pa

_TAIL = 1 << 16
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
_HINTS: Hints = {
    StorageFull: "Free space, then run the same command again: no change is lost.",
    StorageReadOnly: "Pass a file that this user can write to.",
}


class StreamSink(Sink):
    """Writes to an open stream, such as standard output; `close` does not close the stream."""

    place = "standard output"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`; not durable unless the reader makes it so.

        Raises `OutputClosed` if the reader has closed the stream, `StorageError` if the stream is a file that cannot be written.
        """
        with storage_errors(self.place, "written", _HINTS):
            try:
                self._stream.write(lines(batch))
                self._stream.flush()
            except BrokenPipeError:
                raise OutputClosed("the reader of the change log has closed the stream") from None

    def close(self) -> None:
        pass


class FileSink(Sink):
    """Appends to a file, with fsync. Raises `StorageError`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Its content does not change before the first `write`: another sync may own it until then."""
        self._path = path
        self._is_complete = False
        self.place = f"file {path}"
        with storage_errors(path, "written", _HINTS):
            self._file = path.open("ab+", buffering=0)
            try:
                if not self._file.seek(0, os.SEEK_END):
                    sync_directory(path.parent)  # else a crash could lose a new file
            except BaseException:
                self._file.close()
                raise

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. After an error the file contains nothing of the batch.

        The first write removes an incomplete line at the end, left by a killed process. A file lock makes processes on one
        machine take turns, so that a batch being written by another process is not mistaken for one.
        """
        data = memoryview(lines(batch))
        with storage_errors(self._path, "written", _HINTS), _locked(self._file):
            size = self._file.seek(0, os.SEEK_END) if self._is_complete else _remove_incomplete_line(self._file)
            self._is_complete = True
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)
                raise

    def close(self) -> None:
        self._file.close()


def lines(batch: pa.RecordBatch) -> bytes:
    columns = (batch[name].to_pylist() for name in ("key", "value", "expire_ts", "ts", "deleted"))
    return b"".join(_line(*row) for row in zip(*columns, strict=True))


def _line(key: bytes, value: bytes, expire_ts: int, ts: int, deleted: bool) -> bytes:  # noqa: FBT001 - a column
    row: dict[str, object] = {"op": "delete" if deleted else "put", "key": key.hex()}
    if not deleted:
        row |= {"value": value.hex()} | ({"expire_ts": expire_ts} if expire_ts else {})
    return json.dumps(row | {"ts": ts}).encode() + b"\n"


def _remove_incomplete_line(file: BinaryIO) -> int:
    """Truncate a file after its last newline; returns its new size."""
    end = file.seek(0, os.SEEK_END)
    while end:
        first = max(end - _TAIL, 0)
        file.seek(first)
        at = file.read(end - first).rfind(b"\n")
        if at >= 0:
            end = first + at + 1
            break
        end = first
    return file.truncate(end)


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold an exclusive lock on the file; the kernel releases it if the process is killed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # some network file systems have no locks: two syncs there can mix their lines
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
