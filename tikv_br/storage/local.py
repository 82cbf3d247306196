"""A directory as an object store: objects become visible by rename after fsync, or by link for `put_if_absent`."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageReadOnly,
)
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer, check_name
from tikv_br.storage.url import StorageLocation

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM}
_NO_PLACE = {errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT}
_DISK = "Check the path and the health of its disk."

Hints = Mapping[type[StorageError], str]
NO_HINTS: Hints = MappingProxyType({})


def to_storage_error(error: OSError, place: Path | str, done: str, hints: Hints = NO_HINTS) -> StorageError:
    """`place` could not be `done` (written, read, listed, …); `hints` replace the classes' own."""
    kind = _kind(error, done)
    hint = hints.get(kind, _DISK if kind is StorageError else None)
    cause = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in {errno.ENOTDIR, errno.EEXIST} and (file := _file_among_folders(place)):
        cause, hint = f"{file} is a file, not a directory", "Pass the path of a directory."
    return kind(f"{place} cannot be {done}: {cause}", hint=hint)


def _file_among_folders(place: Path | str) -> Path | None:
    """Return the part of a path, or the path itself, that is a file instead of a directory."""
    path = Path(place)
    return next((each for each in (path, *path.parents) if each.exists() and not each.is_dir()), None)


@contextmanager
def storage_errors(place: Path | str, done: str, hints: Hints = NO_HINTS) -> Iterator[None]:
    """Raise what the kernel refuses inside as `to_storage_error` says."""
    try:
        yield
    except OSError as error:
        raise to_storage_error(error, place, done, hints) from None


def _kind(error: OSError, done: str) -> type[StorageError]:
    if error.errno in _FULL:
        return StorageFull
    if done == "written" and error.errno in _REFUSED | _NO_PLACE:
        return StorageReadOnly
    if error.errno in _REFUSED:
        return StorageDenied
    return StorageError


TEMPORARY_PREFIX = ".tikv-br-"
"""Names of files being written: never listed. One stays behind when a writer is killed; nothing reads it."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}
_DIRECTORY_ATTEMPTS = 100
_BUFFER = 64 << 10
"""Bytes: larger pieces go to the file without a copy."""
_REMOVED_ATTEMPTS = 10


class _TemporaryFileRemoved(Exception):
    """Another process took a file that was being written for one that a killed writer had left."""


class LocalObjectStore(ObjectStore):
    """Objects as files below a directory. Makes directories when it writes, removes empty ones when it deletes."""

    def __init__(self, location: StorageLocation) -> None:
        self._location = location
        self._root = Path(location.path)

    def __reduce__(self) -> tuple[Callable[[StorageLocation], ObjectStore], tuple[StorageLocation]]:
        return (type(self), (self._location,))

    @property
    def location(self) -> StorageLocation:
        return self._location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        with self.open_writer(name) as writer:
            writer.write(data)
            return writer.close()

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """By a link, which one process only makes, of a file already durable."""
        for _attempt in range(_REMOVED_ATTEMPTS):
            with suppress(_TemporaryFileRemoved), _LocalWriter(self._path(name), name, publish=_link) as writer:
                writer.write(data)
                return writer.close()
        raise StorageError(f"{self._path(name)} cannot be written: another process keeps removing the temporary file")

    def get(self, name: str) -> bytes:
        path = self._path(name)
        with _reading(path):
            return path.read_bytes()

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        path = self._path(name)
        with _reading(path), path.open("rb", buffering=0) as file:
            file.seek(offset)
            return _read_up_to(file.fileno(), length)

    def stat(self, name: str) -> ObjectInfo:
        path = self._path(name)
        with _reading(path):
            if not path.is_file():
                raise FileNotFoundError
            return _info(name, path)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        top = self._path(folder) if folder else self._root
        for directory, _folders, files in os.walk(top, onerror=_listing_failed):
            place = Path(directory)
            prefix = "" if place == self._root else f"{place.relative_to(self._root).as_posix()}/"
            for file in files:
                if not file.startswith(TEMPORARY_PREFIX):
                    try:
                        info = _info(prefix + file, f"{directory}/{file}")
                    except FileNotFoundError:  # removed by another process just now
                        continue
                    yield info

    def delete(self, name: str) -> None:
        path = self._path(name)
        with storage_errors(path, "written"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a directory that is not empty, or in use, stays
            for parent in path.relative_to(self._root).parents:
                if parent != Path():
                    with suppress(FileNotFoundError):  # a killed deletion may have come so far
                        (self._root / parent).rmdir()

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        top = self._path(folder) if folder else self._root
        for directory in [Path(path) for path, _folders, _files in os.walk(top, topdown=False)] if deep else [top]:
            left: list[Path] = []
            # Another process may have removed the directory, as it was empty.
            with storage_errors(directory, "written"), suppress(FileNotFoundError):
                left = list(directory.glob(f"{TEMPORARY_PREFIX}*"))
            for temporary in left:
                with storage_errors(temporary, "written"), suppress(FileNotFoundError):
                    if time.time() - temporary.stat().st_mtime >= older_than:
                        temporary.unlink()
            if deep:
                with suppress(OSError):  # not empty
                    directory.rmdir()

    def open_writer(self, name: str) -> Writer:
        return _LocalWriter(self._path(name), name, publish=_rename)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)


class _LocalWriter(Writer):
    """A temporary file beside the object's place until `close`."""

    def __init__(self, path: Path, name: str, publish: Callable[[Path, Path], None]) -> None:
        self._path = path
        self._name = name
        self._publish = publish
        self._size = 0
        with storage_errors(path, "written"):
            self._temporary = _temporary_beside(path)
            self._file = self._temporary.open("wb", buffering=_BUFFER)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with storage_errors(self._path, "written"):
            self._size += self._file.write(data)

    def close(self) -> ObjectInfo:
        with storage_errors(self._path, "written"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._publish(self._temporary, self._path)
            sync_directory(self._path.parent)
        return ObjectInfo(self._name, self._size)

    def abort(self) -> None:
        with suppress(OSError):  # what is buffered may still not fit on the disk
            self._file.close()
        with suppress(OSError):  # gone after `close`; else a leftover that nothing reads
            self._temporary.unlink()


def _info(name: str, path: Path | str) -> ObjectInfo:
    status = os.stat(path)  # noqa: PTH116 - a third of the time, where a listing has a million files
    return ObjectInfo(name, status.st_size, modified_ms=status.st_mtime_ns // 1_000_000)


def _temporary_beside(path: Path) -> Path:
    """A new, empty file in the object's directory, which is made if need be."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    made: set[Path] = set()
    for _attempt in range(_DIRECTORY_ATTEMPTS):
        with suppress(FileNotFoundError):  # no directory yet, or a deletion just took it away as empty
            temporary.touch(mode=0o644, exist_ok=False)
            for folder in made:  # which takes a while: before there was a file in them, they could have gone
                sync_directory(folder.parent)
            return temporary
        with suppress(FileNotFoundError):
            made |= _make_directory(path.parent)
    raise FileNotFoundError(errno.ENOENT, "the directory cannot be made")


def _make_directory(directory: Path) -> set[Path]:
    """Make a directory and those above it; returns which were missing, whose names are still to be synced."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:
            # Made by another writer, and a deletion may have removed it again: then `exist_ok` fails.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(folder.stat().st_mode):
                    raise
    return set(missing)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory outlast a crash, where its file system can."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:  # some network file systems
            raise
    finally:
        os.close(descriptor)


def _rename(temporary: Path, path: Path) -> None:
    if path.exists() and not path.is_file():  # to put a file in the place of /dev/null breaks the machine
        raise FileExistsError(errno.EEXIST, "it is not a regular file")
    temporary.replace(path)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise StorageConflict(f"{path} already exists") from None
    except FileNotFoundError:
        raise _TemporaryFileRemoved from None
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StorageError(
                f"the file system of {path.parent} does not support hard links, which are needed to create a file exactly once",
                hint="Use another file system, or S3.",
            ) from None
        raise
    temporary.unlink(missing_ok=True)


def _read_up_to(descriptor: int, length: int) -> bytes:
    """Read until ``length`` bytes or the end: one call of the kernel gives at most 2 GiB."""
    pieces: list[bytes] = []
    while length > 0 and (piece := os.read(descriptor, length)):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        file = _file_among_folders(path.parent)
        more = f": {file} is a file, not a directory" if file else ""
        raise StorageObjectMissing(f"{path} does not exist{more}") from None
    except OSError as error:
        raise to_storage_error(error, path, "read") from None


def _listing_failed(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise to_storage_error(error, Path(str(error.filename)), "listed") from None
