"""A sink of JSON lines: a change log to read, to pipe, or to keep.

A line is ``{"op": "put", "key": HEX, "value": HEX, "expire_ts": S, "ts": TSO}`` or ``{"op": "delete", "key": HEX,
"ts": TSO}``; ``expire_ts`` is left out where it is 0. Lines may come twice, after a restart.
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

from incremental.sinks.base import Sink
from tikv_br.errors import OutputClosed, StorageFull, StorageReadOnly
from tikv_br.storage.disk_errors import Hints, disk_errors
from tikv_br.storage.local import sync_directory

if TYPE_CHECKING:
    import pyarrow as pa

_TAIL = 1 << 16
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
_HINTS: Hints = {
    StorageFull: "Free space, then start again: nothing is lost.",
    StorageReadOnly: "Choose a file that this user may write.",
}


class StreamSink(Sink):
    """Lines on an open stream, such as standard output, that is not closed with the sink."""

    place = "standard output"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`; durable is what the reader makes of it.

        Raises `OutputClosed` when there is none, `StorageError` where the stream is a file that cannot be written.
        """
        with disk_errors(self.place, "written", _HINTS):
            try:
                self._stream.write(lines(batch))
                self._stream.flush()
            except BrokenPipeError:
                raise OutputClosed("the reader of the change log has gone") from None

    def close(self) -> None:
        """See `Sink.close`."""


class FileSink(Sink):
    """Lines at the end of a file, on disk when `write` returns. Raises `StorageError`."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Nothing is changed in it before the first `write`: it may still be another's."""
        self._path = path
        self._is_cut = False
        self.place = f"file {path}"
        with disk_errors(path, "written", _HINTS):
            self._file = path.open("ab+", buffering=0)
            try:
                if not self._file.seek(0, os.SEEK_END):
                    sync_directory(path.parent)  # else a new file could go with a crash, with all that is in it
            except BaseException:
                self._file.close()
                raise

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. After an error nothing of the batch is in the file.

        The first one cuts off half a line at the end, which a killed writer left. Writers of one machine wait for each other:
        a batch that another is just writing is no half line.
        """
        data = memoryview(lines(batch))
        with disk_errors(self._path, "written", _HINTS), _alone(self._file):
            whole = self._file.seek(0, os.SEEK_END) if self._is_cut else _cut_half_line(self._file)
            self._is_cut = True
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._file.truncate(whole)
                raise

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()


def lines(batch: pa.RecordBatch) -> bytes:
    """A line for each row."""
    columns = (batch[name].to_pylist() for name in ("key", "value", "expire_ts", "ts", "deleted"))
    return b"".join(_line(*row) for row in zip(*columns, strict=True))


def _line(key: bytes, value: bytes, expire_ts: int, ts: int, deleted: bool) -> bytes:  # noqa: FBT001 - a column
    row: dict[str, object] = {"op": "delete" if deleted else "put", "key": key.hex()}
    if not deleted:
        row |= {"value": value.hex()} | ({"expire_ts": expire_ts} if expire_ts else {})
    return json.dumps(row | {"ts": ts}).encode() + b"\n"


def _cut_half_line(file: BinaryIO) -> int:
    """The bytes that are left."""
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
def _alone(file: BinaryIO) -> Iterator[None]:
    """Keep other processes that write to the file out; the lock of one that is killed ends with it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # some network file systems: two syncs that write there mix their lines
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
