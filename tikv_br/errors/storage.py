"""Trouble with the object store."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class StorageError(TikvBrError):
    """Trouble with the object store."""


class StorageUnreachable(StorageError):
    """The object store does not answer."""

    exit_code = 20
    default_hint = "Check the URL, the endpoint and the network."
    retryable = True


class StorageDenied(StorageError):
    """Credentials or rights do not suffice."""

    exit_code = 21
    default_hint = "Check the credentials, the bucket's policy and the path."


class StorageFull(StorageError):
    """No space left at the storage."""

    exit_code = 22
    default_hint = "Free space or choose another --storage, then start again."


class StorageReadOnly(StorageError):
    """The storage cannot be written."""

    exit_code = 23
    default_hint = "Choose a --storage that this user may write."


class StorageObjectMissing(StorageError):
    """An object that must exist does not."""

    exit_code = 24
    default_hint = "Check the path; see what is there with the storage's own tools."


class StorageConflict(StorageError):
    """An object that must not exist does: another run was faster."""

    exit_code = 25
    default_hint = "Another run may be writing to the same path; use a path of its own for each backup."
