"""A directory as an object store: objects become visible by rename after fsync, or by link for `put_if_absent`.

Others may write below the directory, so each step of a path below it is taken from the directory before, and follows no symbolic
link; only regular files are read or replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotRegular,
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
_MOST = 1 << 30
"""Bytes that are read by one call."""
_BUFFER = 64 << 10
"""Bytes: larger pieces go to the file without a copy."""
_REMOVED_ATTEMPTS = 10
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""To go through a directory, which needs no right to read it."""
_LOOK = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""To list or sync a directory."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Nonblocking: to open a pipe would wait for its writer."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ODD = {errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""Errors of opening something else than a file or directory."""
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MAX_DEPTH = 256
"""Directories of a listing below each other; a walk opens each from the root."""
log = logging.getLogger(__name__)


class _TemporaryFileRemoved(Exception):
    """Another process took a file that was being written for one that a killed writer had left."""


def refuse_odd(path: Path | str, mode: int) -> None:
    """Raise `StorageNotRegular` unless the mode is of a file or a directory."""
    if what := _KINDS.get(stat.S_IFMT(mode)):
        raise StorageNotRegular(f"{path} is {what}, not a file or a directory of the storage")


class _Tree:
    """The directories below a root. The root may be a symbolic link, but no step below it follows one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, parts: Sequence[str]) -> Path:
        """A path for messages."""
        return self._root.joinpath(*parts)

    def open(self, parts: Sequence[str], flags: int = _PASS) -> int:
        """Open a directory. Raises `OSError`, and `StorageNotRegular` that names a link."""
        descriptor = os.open(self._root, _PASS if parts else flags)
        last = len(parts)
        for depth, part in enumerate(parts, 1):
            above = descriptor
            try:
                descriptor = os.open(part, (flags if depth == last else _PASS) | os.O_NOFOLLOW, dir_fd=above)
            except OSError as error:
                refuse_opened(error, self.path(parts[:depth]), above, part)
                raise
            finally:
                os.close(above)
        return descriptor

    @contextmanager
    def folder(self, parts: Sequence[str], flags: int = _PASS) -> Iterator[int]:
        """A directory, opened as by `open`."""
        descriptor = self.open(parts, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def make(self, parts: Sequence[str], made: set[Path]) -> None:
        """Make a directory and those above it; adds to ``made`` those that were missing, whose names are still to be synced."""
        made |= _make_directory(self._root)
        descriptor = self.open(())
        try:
            for depth, part in enumerate(parts, 1):
                with suppress(FileExistsError):  # a deletion may remove it again: then it cannot be entered
                    os.mkdir(part, dir_fd=descriptor)
                    made.add(self.path(parts[:depth]))
                above = descriptor
                try:
                    descriptor = os.open(part, _PASS | os.O_NOFOLLOW, dir_fd=above)
                except OSError as error:
                    refuse_opened(error, self.path(parts[:depth]), above, part)
                    raise
                os.close(above)
        finally:
            os.close(descriptor)

    def sync_names(self, made: set[Path]) -> None:
        """Sync the directories above those that `make` made."""
        for path in made:
            if path.parent.is_relative_to(self._root):
                with self.folder(path.parent.relative_to(self._root).parts, _LOOK) as folder:
                    _sync(folder)
            else:
                sync_directory(path.parent)

    def remove_empty(self, parts: Sequence[str]) -> None:
        """Remove a directory. Raises `OSError` unless it is empty, or gone."""
        with suppress(FileNotFoundError):
            if not parts:
                self._root.rmdir()
                return
            with self.folder(parts[:-1]) as folder:
                os.rmdir(parts[-1], dir_fd=folder)

    def walk(self, parts: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int, list[str]]]:
        """Each directory at and below one, the upper first: its parts, its open descriptor, and the names of its files.

        Leaves out directories that go meanwhile and, with a warning, what is neither file nor directory.
        """
        pending = [tuple(parts)]
        while pending:
            here = pending.pop()
            with (
                storage_errors(self.path(here), "listed"),
                suppress(FileNotFoundError, NotADirectoryError),
                self.folder(here, _LOOK) as folder,
            ):
                files: list[str] = []
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_file(follow_symlinks=False):
                            files.append(entry.name)
                        elif entry.is_dir(follow_symlinks=False) and len(here) < _MAX_DEPTH:
                            pending.append((*here, entry.name))
                        else:
                            _warn(self.path(here), entry)
                yield here, folder, files


def refuse_opened(error: OSError, path: Path, folder: int, name: str) -> None:
    """Raise `StorageNotRegular` if a link, pipe, socket or device is why a name in a directory could not be opened."""
    if error.errno in _ODD:
        with suppress(OSError):
            refuse_odd(path, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _warn(folder: Path, entry: os.DirEntry[str]) -> None:
    with suppress(FileNotFoundError):
        try:
            refuse_odd(folder / entry.name, entry.stat(follow_symlinks=False).st_mode)
        except StorageNotRegular as error:
            log.warning("left out: %s", error.message)
        else:
            log.warning("left out: %s is more than %d directories deep", folder / entry.name, _MAX_DEPTH)


class LocalObjectStore(ObjectStore):
    """Objects as files below a directory. Makes directories when it writes, removes empty ones when it deletes."""

    def __init__(self, location: StorageLocation) -> None:
        self._location = location
        path, anchor = Path(location.path), Path(location.anchor or location.path)
        inside = path.is_relative_to(anchor)  # else the place was changed to one above the anchor
        self._tree = _Tree(anchor if inside else path)
        self._base = path.relative_to(anchor).parts if inside else ()

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
            with suppress(_TemporaryFileRemoved), _LocalWriter(self._tree, self._parts(name), name, _link) as writer:
                writer.write(data)
                return writer.close()
        path = self._tree.path(self._parts(name))
        raise StorageError(f"{path} cannot be written: another process keeps removing the temporary file")

    def get(self, name: str) -> bytes:
        return self._read(name, 0, None)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        return self._read(name, offset, length)

    def stat(self, name: str) -> ObjectInfo:
        *folders, last = parts = self._parts(name)
        try:
            folder = self._tree.open(folders)
            try:
                status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            finally:
                os.close(folder)
            if not stat.S_ISREG(status.st_mode):
                refuse_odd(self._tree.path(parts), status.st_mode)
                raise FileNotFoundError
        except OSError as error:
            raise _read_error(error, self._tree.path(parts)) from None
        return _info(name, status)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        for parts, descriptor, files in self._tree.walk(self._parts(folder) if folder else self._base):
            prefix = "".join(f"{part}/" for part in parts[len(self._base) :])
            for file in files:
                if not file.startswith(TEMPORARY_PREFIX):
                    try:
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                    except FileNotFoundError:  # removed by another process just now
                        continue
                    yield _info(prefix + file, status)

    def delete(self, name: str) -> None:
        *folders, last = parts = self._parts(name)
        path = self._tree.path(parts)
        with (
            storage_errors(path, "written"),
            suppress(FileNotFoundError),
            self._tree.folder(folders) as folder,
        ):
            refuse_odd(path, os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
            os.unlink(last, dir_fd=folder)
        with suppress(OSError):  # a directory that is not empty, or in use, stays
            for depth in range(len(folders), len(self._base), -1):
                self._tree.remove_empty(folders[:depth])  # a killed deletion may have come so far

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        seen: list[tuple[str, ...]] = []
        for parts, descriptor, files in self._tree.walk(self._parts(folder) if folder else self._base):
            seen.append(parts)
            for temporary in files:
                if temporary.startswith(TEMPORARY_PREFIX):
                    path = self._tree.path((*parts, temporary))
                    # Another process may have removed the file.
                    with storage_errors(path, "written"), suppress(FileNotFoundError):
                        age = time.time() - os.stat(temporary, dir_fd=descriptor, follow_symlinks=False).st_mtime
                        if age >= older_than:
                            os.unlink(temporary, dir_fd=descriptor)
            if not deep:
                return
        for parts in sorted(seen, key=len, reverse=True):
            with suppress(OSError):  # not empty
                self._tree.remove_empty(parts)

    def open_writer(self, name: str) -> Writer:
        return _LocalWriter(self._tree, self._parts(name), name, _rename)

    def make_folder(self) -> None:
        """Make the directory itself, for others to write to. Raises `StorageError`."""
        with storage_errors(self._location.path, "written"):
            for last in (False, False, True):  # another process may be removing the directories above
                try:
                    self._tree.make(self._base, set())
                except FileNotFoundError:
                    if last:
                        raise
                else:
                    return

    def _parts(self, name: str) -> tuple[str, ...]:
        """The path of an object from the tree's root."""
        return (*self._base, *check_name(name).split("/"))

    def _read(self, name: str, offset: int, length: int | None) -> bytes:
        """Read from an offset, to the end if ``length`` is None. Small objects are read often: it takes few calls of the kernel."""
        *folders, last = parts = self._parts(name)
        try:
            folder = self._tree.open(folders)
            try:
                descriptor, size = _open_file(self._tree, parts, folder, last)
            finally:
                os.close(folder)
            try:
                if offset:
                    os.lseek(descriptor, offset, os.SEEK_SET)
                return _read_up_to(descriptor, size + 1 if length is None else length)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _read_error(error, self._tree.path(parts)) from None


def _open_file(tree: _Tree, parts: Sequence[str], folder: int, name: str) -> tuple[int, int]:
    """Open a regular file in a directory to read; its descriptor and size. Raises `OSError`, `StorageNotRegular`."""
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        refuse_opened(error, tree.path(parts), folder, name)
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        refuse_odd(tree.path(parts), status.st_mode)
        raise IsADirectoryError
    return descriptor, status.st_size


class _LocalWriter(Writer):
    """A temporary file beside the object's place until `close`."""

    def __init__(
        self, tree: _Tree, parts: Sequence[str], name: str, publish: Callable[[int, str, str, Path], None]
    ) -> None:
        self._path = tree.path(parts)
        self._name = name
        self._last = parts[-1]
        self._publish = publish
        self._size = 0
        self._temporary = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self._folder = -1
        with storage_errors(self._path, "written"):
            self._folder, descriptor = _create(tree, parts[:-1], self._temporary)
            self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with storage_errors(self._path, "written"):
            self._size += self._file.write(data)

    def close(self) -> ObjectInfo:
        with storage_errors(self._path, "written"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._publish(self._folder, self._temporary, self._last, self._path)
            _sync(self._folder)
        self._close_folder()
        return ObjectInfo(self._name, self._size)

    def abort(self) -> None:
        if self._folder < 0:
            return
        with suppress(OSError):  # what is buffered may still not fit on the disk
            self._file.close()
        with suppress(OSError):  # gone after `close`; else a leftover that nothing reads
            os.unlink(self._temporary, dir_fd=self._folder)
        self._close_folder()

    def _close_folder(self) -> None:
        os.close(self._folder)
        self._folder = -1


def _info(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, modified_ms=status.st_mtime_ns // 1_000_000)


def _create(tree: _Tree, folders: Sequence[str], name: str) -> tuple[int, int]:
    """A directory, which is made if need be, and a new, empty file in it: both open."""
    made: set[Path] = set()
    for _attempt in range(_DIRECTORY_ATTEMPTS):
        with suppress(FileNotFoundError):  # no directory yet, or a deletion just took it away as empty
            folder = tree.open(folders, _LOOK)
            try:
                descriptor = os.open(name, _CREATE, 0o644, dir_fd=folder)
                tree.sync_names(made)  # which takes a while: before there was a file in them, they could have gone
            except BaseException:
                os.close(folder)
                raise
            return folder, descriptor
        with suppress(FileNotFoundError):
            tree.make(folders, made)
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
    """Sync a directory by its path."""
    with _Tree(directory).folder((), _LOOK) as folder:
        _sync(folder)


def _sync(folder: int) -> None:
    """Have the names in a directory outlast a crash, where its file system can."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:  # some network file systems
            raise


def _rename(folder: int, temporary: str, name: str, path: Path) -> None:
    with suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        refuse_odd(path, mode)  # to put a file in the place of /dev/null breaks the machine
        if not stat.S_ISREG(mode):
            raise FileExistsError(errno.EEXIST, "it is not a regular file")
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _link(folder: int, temporary: str, name: str, path: Path) -> None:
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
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
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)


def _read_up_to(descriptor: int, length: int) -> bytes:
    """Read until ``length`` bytes or the end: one call of the kernel gives at most 2 GiB."""
    pieces: list[bytes] = []
    while length > 0 and (piece := os.read(descriptor, min(length, _MOST))):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_error(error: OSError, path: Path) -> StorageError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        file = _file_among_folders(path.parent)
        more = f": {file} is a file, not a directory" if file else ""
        return StorageObjectMissing(f"{path} does not exist{more}")
    return to_storage_error(error, path, "read")
