"""Storages that stores write backups to and read them from: the ``StorageBackend`` of a request, opened as a store does."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import tempfile
import threading
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from tikv_br.cluster.pb import brpb_pb2, encryptionpb_pb2
from tikv_br.playground.failpoints import STORAGE_READ, STORAGE_WRITE
from tikv_br.playground.node import StoreNode

IV_SIZE: Final = 16
_PLAIN: Final = (encryptionpb_pb2.UNKNOWN, encryptionpb_pb2.PLAINTEXT)
_KEY_SIZES: Final = {encryptionpb_pb2.AES128_CTR: 16, encryptionpb_pb2.AES192_CTR: 24, encryptionpb_pb2.AES256_CTR: 32}


class CipherFault(Exception):
    """The method is not supported, or the key has the wrong length."""


def crypt(info: brpb_pb2.CipherInfo, iv: bytes, data: bytes) -> bytes:
    """Encrypt or decrypt (counter mode: both are the same); plain data are returned unchanged.

    Raises `CipherFault`.
    """
    if info.cipher_type in _PLAIN:
        return data
    size = _KEY_SIZES.get(info.cipher_type)
    if size is None:
        raise CipherFault(f"encryption method {info.cipher_type} is not supported")
    if len(info.cipher_key) != size:
        raise CipherFault(f"encryption key has {len(info.cipher_key)} bytes, the method takes {size}")
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    context = Cipher(algorithms.AES(info.cipher_key), modes.CTR(iv)).encryptor()
    return context.update(data) + context.finalize()


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
_CLOUD_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (FileNotFoundError, "NotFound"),  # what obstore raises for an object that does not exist
    (PermissionDeniedError, "PermissionDenied"),
    (UnauthenticatedError, "PermissionDenied"),
)
_INSTANCE_ROLES = "169.254.169.254"
"""Address from which a machine in Amazon's cloud gets its credentials."""


class StorageFault(Exception):
    """The storage failed: ``display`` is the text for an import error, ``debug`` that for a backup error."""

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
    def of_cloud(cls, verb: str, error: BaseError | OSError) -> StorageFault:
        """A failed request to a cloud."""
        kind = next((kind for cause, kind in _CLOUD_KINDS if isinstance(error, cause)), "Other")
        reason = str(error).partition("\n")[0]
        if _INSTANCE_ROLES in reason:  # asked last, when there are no other credentials
            reason = f"rusoto error Couldn't find AWS credentials in sources ({reason})."
        return cls.custom(kind, f"failed to {verb} object {reason}")

    @classmethod
    def custom(cls, kind: str, text: str) -> StorageFault:
        """A failure that is not a system call's."""
        return cls(display=text, debug=f'Io(Custom {{ kind: {kind}, error: "{text}" }})')


class ExternalStorage(Protocol):
    """Files by name. Every method raises `StorageFault`.

    ``nested``: names have folders (``1/x.sst``) instead of being flat (``1_x.sst``); ``url``: for error messages.
    """

    nested: bool
    url: str

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes: ...


class NoopStorage:
    """Discards what is written."""

    nested = False
    url = "noop://"

    def write(self, name: str, data: bytes) -> None:
        pass

    def read(self, name: str) -> bytes:
        del name
        return b""


class LocalStorage:
    """A folder that must exist on the store's machine."""

    nested = True

    def __init__(self, base: Path) -> None:
        self.url = f"local://{base}"
        self._base = base
        try:
            base.stat()
        except OSError as error:
            raise StorageFault.of_os(error) from error

    def write(self, name: str, data: bytes) -> None:
        try:
            target = self._place(name)
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
        try:
            descriptor = os.open(self._place(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with FileIO(descriptor) as file:
                return file.readall()
        except OSError as error:
            raise StorageFault.of_os(error) from error

    def _place(self, name: str) -> Path:
        """The path of a file. Raises `OSError` if a symbolic link or ``..`` would lead out of the folder."""
        place = self._base
        for part in Path(name).parts:
            place /= part
            if part == ".." or place.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
        return place


class CloudStorage:
    """A bucket or container."""

    nested = True

    def __init__(self, url: str, store: S3Store | AzureStore | GCSStore) -> None:
        self.url, self._store = url, store

    def write(self, name: str, data: bytes) -> None:
        try:
            obstore.put(self._store, name, data)
        except (BaseError, OSError) as error:
            raise StorageFault.of_cloud("put", error) from error

    def read(self, name: str) -> bytes:
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except (BaseError, OSError) as error:
            raise StorageFault.of_cloud("get", error) from error


def _open_s3(s3: brpb_pb2.S3) -> CloudStorage:
    """A bucket, with the credentials of the request, or the environment's if it has none."""
    return _open_cloud(
        "s3",
        s3,
        S3Store,
        virtual_hosted_style_request=not s3.force_path_style,
        endpoint=s3.endpoint,
        region=s3.region or "us-east-1",
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_access_key,
        session_token=s3.session_token,
    )


def _open_azure(azure: brpb_pb2.AzureBlobStorage) -> CloudStorage:
    """A container, with the key or SAS token of the request, or the credentials of the environment if it has none."""
    if azure.encryption_scope or azure.HasField("encryption_key"):
        raise StorageFault.custom("Unsupported", "encryption scopes and keys of Azure are not supported here")
    return _open_cloud(
        "azure",
        azure,
        AzureStore,
        account_name=azure.account_name or os.environ.get("AZURE_STORAGE_ACCOUNT"),
        endpoint=azure.endpoint,
        account_key=azure.shared_key or ("" if azure.access_sig else os.environ.get("AZURE_STORAGE_KEY")),
        sas_key=azure.access_sig,
    )


def _open_gcs(gcs: brpb_pb2.GCS) -> CloudStorage:
    """A bucket of Google's, with the key of the request, or the application default credentials if it has none."""
    return _open_cloud("gcs", gcs, GCSStore, base_url=gcs.endpoint, service_account_key=gcs.credentials_blob)


def _open_cloud(
    scheme: str,
    place: brpb_pb2.S3 | brpb_pb2.AzureBlobStorage | brpb_pb2.GCS,
    store: type[S3Store | AzureStore | GCSStore],
    **settings: Any,  # noqa: ANN401 - those of the store
) -> CloudStorage:
    """Open a bucket with the settings that are not empty. Raises `StorageFault` for credentials that are none."""
    prefix = place.prefix.strip("/")
    settings["prefix"] = prefix
    options: dict[str, Any] = {name: value for name, value in settings.items() if value}
    try:
        opened = store(place.bucket, client_options={"allow_http": place.endpoint.startswith("http://")}, **options)
    except BaseError as error:  # no account, or a key that is not base64
        raise StorageFault.of_cloud("open", error) from error
    return CloudStorage(f"{scheme}://" + "/".join(filter(None, (place.bucket, prefix))), opened)


def open_storage(backend: brpb_pb2.StorageBackend) -> ExternalStorage:
    """Open a request's storage, without failpoints. Raises `StorageFault` for a backend that a store does not have."""
    match backend.WhichOneof("backend"):
        case "noop":
            return NoopStorage()
        case "local":
            return LocalStorage(Path(backend.local.path))
        case "s3":
            return _open_s3(backend.s3)
        case "gcs":
            return _open_gcs(backend.gcs)
        case "azure_blob_storage":
            return _open_azure(backend.azure_blob_storage)
        case other:
            raise StorageFault.custom("NotFound", f"bad storage backend {other or ''}")


_DISK_FULL: Final = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
_LATE_SECONDS: Final = 1.0


class _FailpointStorage:
    """An external storage of one store, with its failpoints."""

    def __init__(self, node: StoreNode, inner: ExternalStorage) -> None:
        self.nested, self.url = inner.nested, inner.url
        self._node, self._inner = node, inner

    def write(self, name: str, data: bytes) -> None:
        failure = self._node.failpoints.intercept_storage(STORAGE_WRITE, store_id=self._node.store_id)
        try:
            if failure is not None and failure.kind == "disk_full":
                raise StorageFault.of_os(_DISK_FULL)
            if failure is None or failure.after:
                self._inner.write(name, data)
        except StorageFault as fault:
            if fault.debug == StorageFault.of_os(_DISK_FULL).debug:
                threading.Timer(_LATE_SECONDS, self._leave, (name, data[: len(data) // 2])).start()
            raise
        if failure is not None:
            raise StorageFault.custom("Other", failure.message)

    def _leave(self, name: str, data: bytes) -> None:
        """Write what a store has begun when its disk is full, and finishes after the client has given up."""
        with contextlib.suppress(StorageFault):
            self._inner.write(name, data)

    def read(self, name: str) -> bytes:
        failure = self._node.failpoints.intercept_storage(STORAGE_READ, store_id=self._node.store_id)
        if failure is not None and failure.kind == "disk_full":
            raise StorageFault.of_os(_DISK_FULL)
        if failure is not None and failure.kind == "storage_error":
            raise StorageFault.custom("Other", failure.message)
        data = self._inner.read(name)
        if failure is None or not data:
            return data
        at = random.randrange(len(data))  # noqa: S311 - faults, no secrets
        return data[:at] if failure.kind == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def open_for(node: StoreNode, backend: brpb_pb2.StorageBackend) -> ExternalStorage:
    """Open the storage of a request to a store. Raises `StorageFault`."""
    return _FailpointStorage(node, open_storage(backend))
