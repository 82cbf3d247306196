"""Where stores put and fetch the files of backups: the ``StorageBackend`` of a request, opened as a store opens it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from tikv_br.cluster.pb import brpb_pb2

_KINDS: Final = {
    errno.ENOENT: "NotFound",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.EEXIST: "AlreadyExists",
    errno.ENOSPC: "StorageFull",
    errno.EROFS: "ReadOnlyFilesystem",
    errno.ENOTDIR: "NotADirectory",
    errno.EISDIR: "IsADirectory",
}
_S3_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (FileNotFoundError, "NotFound"),  # what obstore raises for an object that is not there
    (PermissionDeniedError, "PermissionDenied"),
    (UnauthenticatedError, "PermissionDenied"),
)


class StorageFault(Exception):
    """The storage failed. ``display`` is what an import error says of it, ``debug`` what a backup error says."""

    def __init__(self, *, display: str, debug: str) -> None:
        super().__init__(display)
        self.display = display
        self.debug = debug

    @classmethod
    def of_os(cls, error: OSError) -> StorageFault:
        """A failed system call, in the words of Rust's standard library."""
        code = error.errno or 0
        text = os.strerror(code)
        kind = _KINDS.get(code, "Uncategorized")
        return cls(
            display=f"{text} (os error {code})",
            debug=f'Io(Os {{ code: {code}, kind: {kind}, message: "{text}" }})',
        )

    @classmethod
    def of_custom(cls, kind: str, text: str) -> StorageFault:
        """A failure that is no system call's."""
        return cls(display=text, debug=f'Io(Custom {{ kind: {kind}, error: "{text}" }})')


class ExternalStorage(Protocol):
    """Files by name. Every method raises `StorageFault`."""

    @property
    def nested(self) -> bool:
        """Whether names have folders (``1/x.sst``) or are flat (``1_x.sst``)."""
        ...

    @property
    def url(self) -> str:
        """As error messages name it."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Store a file, whole or not at all; one of that name is replaced."""
        ...

    def read(self, name: str) -> bytes:
        """A file's bytes."""
        ...


class NoopStorage:
    """Takes everything, keeps nothing."""

    nested: ClassVar[bool] = False
    url = "noop://"

    def write(self, name: str, data: bytes) -> None:
        """Forget it."""

    def read(self, name: str) -> bytes:
        """Nothing, of any name."""
        del name
        return b""


class LocalStorage:
    """A folder that must exist on the store's machine."""

    nested: ClassVar[bool] = True

    def __init__(self, base: Path) -> None:
        self._base = base
        try:
            base.stat()
        except OSError as error:
            raise StorageFault.of_os(error) from error

    @property
    def url(self) -> str:
        """``local://`` and the path."""
        return f"local://{self._base}"

    def write(self, name: str, data: bytes) -> None:
        """Write beside it, then rename; names may lie in new folders."""
        target = self._base / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._base, prefix=".tmp", delete=False) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).rename(target)
        except OSError as error:
            raise StorageFault.of_os(error) from error

    def read(self, name: str) -> bytes:
        """The file's bytes."""
        try:
            return (self._base / name).read_bytes()
        except OSError as error:
            raise StorageFault.of_os(error) from error


_INSTANCE_ROLES = "169.254.169.254"
"""Where a machine in Amazon's cloud learns its credentials."""


class S3Storage:
    """A bucket, with the credentials that the request brings (the environment's where it brings none)."""

    nested: ClassVar[bool] = True

    def __init__(self, s3: brpb_pb2.S3) -> None:
        self.url = "s3://" + "/".join(filter(None, (s3.bucket, s3.prefix.strip("/"))))
        settings: dict[str, Any] = {
            "endpoint": s3.endpoint,
            "region": s3.region or "us-east-1",
            "access_key_id": s3.access_key,
            "secret_access_key": s3.secret_access_key,
            "session_token": s3.session_token,
            "prefix": s3.prefix.strip("/"),
        }
        self._store = S3Store(
            s3.bucket,
            virtual_hosted_style_request=not s3.force_path_style,
            client_options={"allow_http": s3.endpoint.startswith("http://")},
            **{name: value for name, value in settings.items() if value},
        )

    def write(self, name: str, data: bytes) -> None:
        """Put the object."""
        try:
            obstore.put(self._store, name, data)
        except (BaseError, OSError) as error:
            raise _s3_fault("put", error) from error

    def read(self, name: str) -> bytes:
        """Get the object."""
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except (BaseError, OSError) as error:
            raise _s3_fault("get", error) from error


def open_storage(backend: brpb_pb2.StorageBackend) -> ExternalStorage:
    """Open what a request names. Raises `StorageFault` for a backend that a store does not have."""
    match backend.WhichOneof("backend"):
        case "noop":
            return NoopStorage()
        case "local":
            return LocalStorage(Path(backend.local.path))
        case "s3":
            return S3Storage(backend.s3)
        case other:
            raise StorageFault.of_custom("NotFound", f"bad storage backend {other or ''}")


def _s3_fault(verb: str, error: BaseError | OSError) -> StorageFault:
    kind = next((kind for cause, kind in _S3_KINDS if isinstance(error, cause)), "Other")
    reason = str(error).partition("\n")[0]
    if _INSTANCE_ROLES in reason:  # asked last, when nothing else has any
        reason = f"rusoto error Couldn't find AWS credentials in sources ({reason})."
    return StorageFault.of_custom(kind, f"failed to {verb} object {reason}")
