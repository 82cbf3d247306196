"""An S3 bucket as an object store, over obstore."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tikv_br.errors import StorageError, UsageError
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer, check_name
from tikv_br.storage.credentials import chain, obstore_provider, region_of
from tikv_br.storage.open import open_store
from tikv_br.storage.s3_errors import TWO_AT_ONCE, failure_of, translate
from tikv_br.storage.s3_writer import S3Writer, UploadTarget, plain_etag
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

CONNECT_TIMEOUT = timedelta(seconds=3)
FIRST_ANSWER_TIMEOUT = timedelta(seconds=4)
REQUEST_TIMEOUT = timedelta(minutes=2)
"""A request with its body, a part of an upload at most."""
RETRY_BUDGET = timedelta(seconds=60)
"""How long an endpoint that has answered before may fail to."""

_PAUSES_WHERE_TWO_MET = (0.05, 0.2, 0.8)
"""Seconds between tries of a conditional write that met another one."""

_REQUEST_FAILURES = (BaseError, OSError, ValueError)
"""What obstore raises for a request: its own classes, and builtin ones for missing objects and bad ranges."""

_runtime_owner: int | None = None


class S3ObjectStore(ObjectStore):
    """Objects in a bucket below a prefix.

    The first call asks the endpoint for a sign of life with little patience, so that a wrong address is said within
    seconds; from then on outages shorter than `RETRY_BUDGET` are ridden out.
    """

    def __init__(self, location: StorageLocation) -> None:
        self._location = location
        self._provider = obstore_provider(chain(location.s3))
        self._region = region_of(location.s3)
        self._store = self._open(
            {"max_retries": 10, "retry_timeout": RETRY_BUDGET, "backoff": {"max_backoff": timedelta(seconds=5)}},
            REQUEST_TIMEOUT,
        )
        self._answered = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[StorageLocation], ObjectStore], tuple[StorageLocation]]:
        return (open_store, (self._location,))

    @property
    def location(self) -> StorageLocation:
        """Bucket and prefix."""
        return self._location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put`."""
        with self._request("write", name):
            return self._put(name, data, "overwrite")

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put_if_absent`: a conditional request, ``If-None-Match: *``, again where another one was under way."""
        with self._request("write", name):
            for pause in _PAUSES_WHERE_TWO_MET:
                try:
                    return self._put(name, data, "create")
                except _REQUEST_FAILURES as error:
                    if failure_of(error).code != TWO_AT_ONCE:
                        raise
                time.sleep(pause)
            return self._put(name, data, "create")

    def get(self, name: str) -> bytes:
        """See `ObjectStore.get`."""
        with self._request("read", name) as store:
            return obstore.get(store, name).bytes().to_bytes()

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        if length <= 0:
            return b""
        with self._request("read", name) as store:
            try:
                return obstore.get_range(store, name, start=offset, length=length).to_bytes()
            except _REQUEST_FAILURES as error:
                if failure_of(error).status == _RANGE_BEYOND_END:
                    return b""
                raise

    def stat(self, name: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        with self._request("look at", name) as store:
            try:
                meta = obstore.head(store, name)
            except _REQUEST_FAILURES:
                # A refused HEAD has no body that says why. A GET has.
                meta = obstore.get(store, name).meta
            return _info(name, meta)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self._lend("list", folder) as store:
            for page in obstore.list(store, check_name(folder) if folder else None):
                for meta in page:
                    yield _info(meta["path"], meta)

    def delete(self, name: str) -> None:
        """See `ObjectStore.delete`."""
        with self._request("delete", name) as store:
            try:
                obstore.delete(store, name)
            except FileNotFoundError as error:
                if failure_of(error).code not in {"", "NoSuchKey"}:
                    raise

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """See `ObjectStore.sweep`."""

    def open_writer(self, name: str) -> Writer:
        """See `ObjectStore.open_writer`."""
        with self._request("write", name) as store:
            return S3Writer(
                UploadTarget(store, name, self._attributes(), lambda error: self._translate(error, "write", name))
            )

    def _put(self, name: str, data: bytes, mode: Literal["create", "overwrite"]) -> ObjectInfo:
        result = obstore.put(self._store, name, data, mode=mode, attributes=self._attributes(), use_multipart=False)
        return ObjectInfo(name, len(data), plain_etag(result["e_tag"]))

    def _request(self, action: str, name: str) -> AbstractContextManager[S3Store]:
        return self._lend(action, check_name(name))

    @contextmanager
    def _lend(self, action: str, name: str) -> Iterator[S3Store]:
        """Lend the store for requests on ``name``, and turn what they end with into our errors."""
        _own_runtime()
        try:
            self._await_answer()
            yield self._store
        except StorageError:
            raise
        except _REQUEST_FAILURES as error:
            raise self._translate(error, action, name) from None

    def _translate(self, error: Exception, action: str, name: str) -> StorageError:
        return translate(error, self._location, action, name)

    def _await_answer(self) -> None:
        with self._lock:
            if self._answered:
                return
            impatient = self._open({"max_retries": 1, "retry_timeout": 2 * FIRST_ANSWER_TIMEOUT}, FIRST_ANSWER_TIMEOUT)
            try:
                obstore.head(impatient, "backupmeta")
            except _REQUEST_FAILURES as error:
                if not failure_of(error).answered:
                    raise
            self._answered = True

    def _open(self, retries: RetryConfig, timeout: timedelta) -> S3Store:
        client: ClientConfig = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, "timeout": timeout}
        if self._location.s3.ca:
            client["root_certificate"] = _authorities(self._location.s3.ca)
        return S3Store(
            self._location.bucket,
            prefix=self._location.path or None,
            config=self._config(),
            client_options=client,
            retry_config=retries,
            credential_provider=self._provider,
        )

    def _config(self) -> S3Config:
        options = self._location.s3
        config: S3Config = {
            "region": self._region,
            "virtual_hosted_style_request": not options.path_style,
            "disable_bulk_delete": True,  # single deletions need no further right and work at every provider
        }
        if options.endpoint:
            config["endpoint"] = options.endpoint if options.path_style else _with_bucket(self._location)
        if options.sse:
            config["server_side_encryption"] = options.sse
        if options.sse_kms_key_id:
            config["sse_kms_key_id"] = options.sse_kms_key_id
        return config

    def _attributes(self) -> Attributes | None:
        return {"Storage-Class": self._location.s3.storage_class} if self._location.s3.storage_class else None


_RANGE_BEYOND_END = 416


def _info(name: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], plain_etag(meta["e_tag"]), int(meta["last_modified"].timestamp() * 1000))


def _with_bucket(location: StorageLocation) -> str:
    """The endpoint with the bucket in its host name, as obstore wants it without path style."""
    parts = urlsplit(location.s3.endpoint)
    return f"{parts.scheme}://{location.bucket}.{parts.netloc}"


def _authorities(path: str) -> bytes:
    try:
        pem = Path(path).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except OSError as error:
        raise UsageError(f"--s3.ca: {path} cannot be read: {error.strerror}") from None
    except (ssl.SSLError, ValueError):
        raise UsageError(f"--s3.ca: {path} holds no certificates", hint="Give a PEM file of the authority.") from None
    return pem


def _own_runtime() -> None:
    """Refuse to work in a child forked after obstore's threads were started: there it would wait for ever."""
    global _runtime_owner  # noqa: PLW0603  # the threads are the process's
    if _runtime_owner not in {None, os.getpid()}:
        raise StorageError(
            "S3 was used in this process's parent before the fork",
            hint="Start processes by spawn, or use S3 only in them.",
        )
    _runtime_owner = os.getpid()
