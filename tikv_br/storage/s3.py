"""An S3 bucket as an object store, over obstore."""

from __future__ import annotations

import functools
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit
from xml.sax.saxutils import unescape

import obstore
from obstore.exceptions import BaseError, UnauthenticatedError
from obstore.store import S3Store

from tikv_br import cancellation
from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
    TikvBrError,
    UsageError,
)
from tikv_br.retry import STORAGE_UNREACHABLE, Backoffer, RetryPolicy
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer, check_name
from tikv_br.storage.credentials import credential_source, region_of, to_obstore_provider
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import health_of
from tikv_br.storage.s3_writer import S3Writer, UploadTarget, in_background, plain_etag
from tikv_br.storage.url import DEFAULT_REGION, StorageLocation

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutResult
    from obstore.store import ClientConfig, RetryConfig, S3Config


_REASONS = {
    "InvalidAccessKeyId": "the access key is unknown",
    "XAdminUserNotFound": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret access key does not match the access key",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's",
    "AccessDenied": "the credentials lack the permission",
    "AllAccessDisabled": "access to the bucket is disabled",
    "InvalidObjectState": "the object is archived and must be restored first",
}
_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_FULL = {"QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientStorage", "QuotaExceededException"}
_TAKEN = {"PreconditionFailed"}
CONDITIONAL_CONFLICT = "ConditionalRequestConflict"
"""Two conditional writes of one object met: neither need have succeeded, and both are to try again."""
_MOVED = 301
_REFUSALS = {401, 403}
_NOT_FOUND = 404
_PRECONDITION_FAILED = 412
_OVERLOADED = {429, 500, 502, 503, 504}
_NOT_DONE = {429, 500, 503}
_INSUFFICIENT_STORAGE = 507
_UNKNOWN_HINT = "The message is from the S3 endpoint; check the endpoint's log."
_BAD_BUCKET = "InvalidBucketName"
_UNSENT = "Connect"
"""obstore's kind of a failure before anything was sent."""
_CONNECTION_CAUSES = (
    ("Connection refused", "connection refused"),
    ("dns error", "the host name does not resolve"),
    ("InvalidContentType", "the endpoint does not use TLS; does it need http://?"),
    ("Expired", "its certificate has expired"),
    ("NotValidForName", "its certificate is for another name"),
    ("InvalidCertificate", "its certificate is not trusted"),
    ("UnknownIssuer", "its certificate is not trusted"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "no route to the host"),
    ("imed out", "no answer in time"),
    ("Timeout", "no answer in time"),
    ("Elapsed", "no answer in time"),
)


@dataclass(frozen=True, slots=True)
class S3Failure:
    """The parts of a failed request that decide and that may be shown."""

    status: int
    """HTTP status; 0 = no answer came."""
    code: str
    message: str
    region: str
    """The region that the server says is right."""
    text: str
    """All of it, not for showing."""
    broken: str = ""
    """obstore's kind of a failed connection: ``Connect``, ``Timeout``, ``Interrupted`` …; ``""`` = it did not fail."""
    cause: str = ""
    """What the connection failed with; holds no name of a bucket or object."""

    @property
    def answered(self) -> bool:
        """Whether the server said anything at all."""
        return self.status != 0

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return bool(self.broken) if not self.answered else self.status in _OVERLOADED

    @property
    def had_no_effect(self) -> bool:
        """Whether the request certainly was not carried out: it was not sent, or the server reported that it failed."""
        return self.broken == _UNSENT or self.status in _NOT_DONE


def failure_of(error: Exception) -> S3Failure:
    """Read what obstore says of a failed request.

    Only in the report of the cause that obstore appends, and by marks that begin on lines of their own: names of buckets and
    objects, which stand elsewhere in the text, cannot contain a line break.
    """
    text = str(error)
    if re.search(r"\n\s*inner: BareRedirect", text):  # to the bucket's true region
        return S3Failure(_MOVED, "PermanentRedirect", "", "", text)
    if broken := re.search(r"HttpError \{\n\s*kind: (\w+),\n.*", text, re.DOTALL):
        return S3Failure(0, "", "", "", text, broken[1], broken[0])
    status = re.search(r"\n\s*inner: Status \{\n\s*status: (\d{3}),", text)
    found = re.search(r'\n\s*body: Some\(\n\s*"((?:[^"\\]|\\.)*)",?\n', text)
    body = found[1].replace('\\"', '"') if found else ""
    return S3Failure(
        int(status[1]) if status else 0,
        _element(body, "Code"),
        _element(body, "Message"),
        _element(body, "Region"),
        text,
    )


def translate(error: Exception, location: StorageLocation, action: str, name: str) -> StorageError | UsageError:
    """The error of ours for a request that obstore gave up: ``action`` as in "cannot <action> <name>"."""
    failure = failure_of(error)
    place = f"{location.redacted().partition('?')[0]}/{name}".rstrip("/")
    if isinstance(error, UnauthenticatedError) and not failure.answered:
        # The source of credentials has failed; nothing was sent.
        cause = failure.text.partition("Debug source")[0].rpartition("StorageDenied: ")[2].strip()
        return StorageDenied(f"cannot {action} {place}: {cause}")
    if not failure.answered:
        return _unanswered(failure, location, f"cannot {action} {place}")
    if failure.code == "NoSuchBucket":
        return StorageObjectMissing(
            f"bucket {location.bucket!r} does not exist at {_endpoint(location)}",
            hint="Create the bucket, or check the URL.",
        )
    if failure.code == _BAD_BUCKET:
        return UsageError(
            f"{_endpoint(location)} refuses the bucket name {location.bucket!r}: {_server_message(failure)}",
            hint="Check the bucket in the storage URL: s3://BUCKET/prefix.",
        )
    if failure.code in _WRONG_REGION or failure.status == _MOVED:
        return _wrong_region(failure, location)
    kind = _kind_of(failure)
    if kind is StorageObjectMissing:
        return kind(f"{place} does not exist")
    if kind is StorageConflict:
        return kind(f"{place} already exists")
    reason = _REASONS.get(failure.code, "")
    said = f"{reason} ({_server_message(failure)})" if reason else _server_message(failure)
    return kind(f"cannot {action} {place}: {said}", hint=_UNKNOWN_HINT if kind is StorageError else None)


def _kind_of(failure: S3Failure) -> type[StorageError]:
    status, code = failure.status, failure.code
    if code in _FULL or status == _INSUFFICIENT_STORAGE:
        return StorageFull
    if code in _REASONS or status in _REFUSALS:
        return StorageDenied
    if status == _NOT_FOUND:
        return StorageObjectMissing
    if code in _TAKEN or status == _PRECONDITION_FAILED:
        return StorageConflict
    return StorageUnreachable if status in _OVERLOADED or code == CONDITIONAL_CONFLICT else StorageError


def _unanswered(failure: S3Failure, location: StorageLocation, what: str) -> StorageError:
    for mark, cause in _CONNECTION_CAUSES:
        if mark in failure.cause:
            return StorageUnreachable(f"{_endpoint(location)} does not answer: {cause}")
    if failure.broken:
        return StorageUnreachable(f"{_endpoint(location)} does not answer")
    first = failure.text.partition("Debug source")[0].strip()
    return StorageError(f"{what}: {first}", hint="Check the URL and the storage's settings.")


def _wrong_region(failure: S3Failure, location: StorageLocation) -> StorageError:
    said = location.s3.region or DEFAULT_REGION
    right = f"in region {failure.region!r}, not {said!r}" if failure.region else f"not in region {said!r}"
    hint = f"Set --s3.region {failure.region}." if failure.region else "Set --s3.region to the bucket's region."
    return StorageDenied(f"bucket {location.bucket!r} is {right}", hint=hint)


def _server_message(failure: S3Failure) -> str:
    """Status, code and message of the server in one clause."""
    return ", ".join(filter(None, (f"HTTP {failure.status} {failure.code}".strip(), failure.message)))


def _endpoint(location: StorageLocation) -> str:
    return location.s3.endpoint or f"Amazon S3 in {location.s3.region or DEFAULT_REGION}"


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1], {"&#34;": '"', "&quot;": '"', "&#39;": "'"}) if found else ""


CONNECT_TIMEOUT = timedelta(seconds=3)
FIRST_ANSWER_TIMEOUT = timedelta(seconds=4)
"""For a probe."""
SILENCE_TIMEOUT = timedelta(seconds=20)
"""How long a request may bring nothing, but for the large ones that write."""
REQUEST_TIMEOUT = timedelta(minutes=2)
"""A request with its body, a part of an upload at most."""
LARGE_BYTES = 1 << 20
"""Larger writes may take `REQUEST_TIMEOUT`; whether the location answers is checked in the meantime."""
QUIET_SECONDS = 10.0
"""How long the location may answer nothing during a large write before it is probed."""
_OWN_RETRIES = 1000
"""Of parts of uploads, by obstore: as many as fit in the patience."""

_CONFLICT_PAUSES = (0.05, 0.2, 0.8)
"""Seconds between tries of a conditional write that met another one."""

_REQUEST_FAILURES = (BaseError, OSError, ValueError)
"""What obstore raises for a request: its own classes, and builtin ones for missing objects and bad ranges."""

T = TypeVar("T")
_runtime_owner: int | None = None


class S3ObjectStore(ObjectStore):
    """Objects in a bucket below a prefix.

    The first request of a process to a location is a probe, so that a wrong address is reported within seconds; from then on
    outages shorter than `S3Options.patience` are retried, see `tikv_br.storage.outage`.
    """

    def __init__(self, location: StorageLocation) -> None:
        self._location = location
        self._provider = to_obstore_provider(credential_source(location.s3))
        self._region = region_of(location.s3)
        self._patience = location.s3.patience
        silence = min(SILENCE_TIMEOUT, max(timedelta(seconds=self._patience), FIRST_ANSWER_TIMEOUT))
        self._store = self._open({"timeout": REQUEST_TIMEOUT, "read_timeout": silence})
        self._health = health_of(location.health_key)

    def __reduce__(self) -> tuple[Callable[[StorageLocation], ObjectStore], tuple[StorageLocation]]:
        return (open_store, (self._location,))

    @property
    def location(self) -> StorageLocation:
        """Bucket and prefix."""
        return self._location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put`."""
        return self._put(name, data, "overwrite")

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put_if_absent`: a conditional request, ``If-None-Match: *``, again where another one was under way."""
        return self._put(name, data, "create")

    def get(self, name: str) -> bytes:
        """See `ObjectStore.get`."""
        return self._request("read", check_name(name), lambda store: obstore.get(store, name).bytes().to_bytes())

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        if length <= 0:
            return b""

        def read(store: S3Store) -> bytes:
            try:
                return obstore.get_range(store, name, start=offset, length=length).to_bytes()
            except _REQUEST_FAILURES as error:
                if failure_of(error).status == _RANGE_BEYOND_END:
                    return b""
                raise

        return self._request("read", check_name(name), read)

    def stat(self, name: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""

        def look(store: S3Store) -> ObjectInfo:
            try:
                meta = obstore.head(store, name)
            except _REQUEST_FAILURES as error:
                if not failure_of(error).answered:
                    raise
                # A refused HEAD has no body with the reason. A GET has.
                meta = obstore.get(store, name).meta
            return _info(name, meta)

        return self._request("inspect", check_name(name), look)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        prefix = check_name(folder) if folder else None
        last: str | None = None
        pages: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page(store: S3Store) -> Sequence[ObjectMeta]:
            nonlocal pages
            if pages is None:  # at the beginning, and after a failure: behind what was listed
                pages = iter(obstore.list(store, prefix, offset=last))
            try:
                return next(pages, ())
            except _REQUEST_FAILURES:
                pages = None
                raise

        while page := self._request("list", folder, next_page):
            for meta in page:
                last = meta["path"]
                yield _info(meta["path"], meta)

    def delete(self, name: str) -> None:
        """See `ObjectStore.delete`."""

        def remove(store: S3Store) -> None:
            try:
                obstore.delete(store, name)
            except FileNotFoundError as error:
                if failure_of(error).code not in {"", "NoSuchKey"}:
                    raise

        self._request("delete", check_name(name), remove)

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """See `ObjectStore.sweep`."""

    def open_writer(self, name: str) -> Writer:
        """See `ObjectStore.open_writer`."""
        check_name(name)
        self._wait_until_available()
        return S3Writer(
            UploadTarget(
                self._upload_store,
                name,
                self._attributes(),
                lambda error: self._translate(error, "write", name),
                self._watch,
                self._health,
            )
        )

    def _put(self, name: str, data: bytes, mode: Literal["create", "overwrite"]) -> ObjectInfo:
        check_name(name)
        attributes = self._attributes()

        def write(store: S3Store) -> PutResult:
            def once() -> PutResult:
                return obstore.put(store, name, data, mode=mode, attributes=attributes, use_multipart=False)

            if mode == "overwrite":
                return once()
            for pause in _CONFLICT_PAUSES:
                try:
                    return once()
                except _REQUEST_FAILURES as error:
                    if failure_of(error).code != CONDITIONAL_CONFLICT:
                        raise
                time.sleep(pause)
            return once()

        def write_large(_store: S3Store) -> PutResult:
            return in_background(lambda: write(self._large_store), f"write {name}", self._watch)

        send = write if len(data) < LARGE_BYTES else write_large
        result = self._request("write", name, send, repeatable=mode == "overwrite")
        return ObjectInfo(name, len(data), plain_etag(result["e_tag"]))

    def _request(self, action: str, name: str, send: Callable[[S3Store], T], *, repeatable: bool = True) -> T:
        """Send a request on ``name`` until it is answered, and turn what it ends with into our errors.

        What is not ``repeatable`` is sent again only where the first certainly had no effect.
        """
        self._wait_until_available()
        patience = Backoffer(f"{action} {name}", RetryPolicy(self._patience, error=None, nested=False))
        while True:
            began = time.monotonic()
            try:
                result = send(self._store)
            except _REQUEST_FAILURES as error:
                failure, problem = failure_of(error), self._translate(error, action, name)
                if failure.answered and not failure.is_transient:
                    self._health.succeeded()
                if not failure.is_transient:
                    raise problem from None
                self._health.failed(began)
                if not (repeatable or failure.had_no_effect):
                    raise problem from None
            else:
                self._health.succeeded()
                return result
            patience.wait(STORAGE_UNREACHABLE, problem)  # ends though others may be answered
            self._wait_until_available(problem)

    def _translate(self, error: Exception, action: str, name: str) -> TikvBrError:
        return translate(error, self._location, action, name)

    def _wait_until_available(self, problem: TikvBrError | None = None) -> None:
        """Return once the location answers; ``problem`` is what to report if it does not."""
        _check_not_forked()
        self._health.wait(lambda: self._ask(problem), self._patience)

    def _ask(self, problem: TikvBrError | None) -> TikvBrError | None:
        """Send a probe; returns None, or its error. Raises permanent errors."""
        try:
            obstore.head(self._probe_store, "backupmeta")
        except _REQUEST_FAILURES as error:
            failure = failure_of(error)
            if failure.is_transient:
                return problem or self._translate(error, "read", "backupmeta")
            if not failure.answered:
                raise self._translate(error, "read", "backupmeta") from None
        return None

    def _watch(self, began: float) -> None:
        """During a large write: raise `StorageAway` once the location has been unavailable for longer than the patience."""
        cancellation.check()
        if self._health.quiet_seconds(began) > QUIET_SECONDS:
            self._health.failed(began)
        self._wait_until_available()

    @functools.cached_property
    def _probe_store(self) -> S3Store:
        """For probes."""
        return self._open({"timeout": FIRST_ANSWER_TIMEOUT})

    @functools.cached_property
    def _large_store(self) -> S3Store:
        """For objects of `LARGE_BYTES`."""
        return self._open({"timeout": REQUEST_TIMEOUT})

    @functools.cached_property
    def _upload_store(self) -> S3Store:
        """For parts of uploads, which obstore retries."""
        retries: RetryConfig = {
            "max_retries": _OWN_RETRIES,
            "retry_timeout": timedelta(seconds=self._patience),
            "backoff": {"max_backoff": timedelta(seconds=STORAGE_UNREACHABLE.cap)},
        }
        return self._open({"timeout": REQUEST_TIMEOUT}, retries)

    def _open(self, timeouts: ClientConfig, retries: RetryConfig | None = None) -> S3Store:
        client: ClientConfig = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, **timeouts}
        if self._location.s3.ca:
            client["root_certificate"] = _authorities(self._location.s3.ca)
        return S3Store(
            self._location.bucket,
            prefix=self._location.path or None,
            config=self._config(),
            client_options=client,
            retry_config=retries or {"max_retries": 0, "retry_timeout": REQUEST_TIMEOUT},
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
        raise UsageError(f"--s3.ca: cannot read {path}: {error.strerror}") from None
    except (ssl.SSLError, ValueError):
        raise UsageError(
            f"--s3.ca: {path} contains no certificates", hint="Pass a PEM file of the certificate authority."
        ) from None
    return pem


def _check_not_forked() -> None:
    """Refuse to work in a child forked after obstore's threads were started: there it would wait forever."""
    global _runtime_owner  # noqa: PLW0603  # the threads are the process's
    if _runtime_owner not in {None, os.getpid()}:
        raise StorageError(
            "S3 was used in this process's parent before the fork",
            hint="Start processes with spawn, or use S3 only in the child processes.",
        )
    _runtime_owner = os.getpid()
