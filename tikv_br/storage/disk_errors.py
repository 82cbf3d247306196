"""What the kernel says of a file or directory on this machine, as one of our errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tikv_br.errors import StorageDenied, StorageError, StorageFull, StorageReadOnly

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM}
_NO_PLACE = {errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT}
_DISK = "Check the path and the health of its disk."

Hints = Mapping[type[StorageError], str]
NO_HINTS: Hints = MappingProxyType({})


def refusal(error: OSError, place: Path | str, done: str, hints: Hints = NO_HINTS) -> StorageError:
    """`place` could not be `done` (written, read, listed, …); `hints` replace the classes' own."""
    reason = f"{place} cannot be {done}: {os.strerror(error.errno) if error.errno else error}"
    kind = _kind(error, done)
    return kind(reason, hint=hints.get(kind, _DISK if kind is StorageError else None))


@contextmanager
def disk_errors(place: Path | str, done: str, hints: Hints = NO_HINTS) -> Iterator[None]:
    """Raise what the kernel refuses inside as `refusal` says."""
    try:
        yield
    except OSError as error:
        raise refusal(error, place, done, hints) from None


def _kind(error: OSError, done: str) -> type[StorageError]:
    if error.errno in _FULL:
        return StorageFull
    if done == "written" and error.errno in _REFUSED | _NO_PLACE:
        return StorageReadOnly
    if error.errno in _REFUSED:
        return StorageDenied
    return StorageError
