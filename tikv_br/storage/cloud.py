"""Common code of the object stores of all clouds: requests over obstore, and outages.

Uploads a large object to a cloud: parts are sent while the next ones are written.
"""

from __future__ import annotations

import abc
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar

import obstore
from obstore.exceptions import BaseError

from tikv_br import cancellation
from tikv_br.errors import StorageDenied, StorageError, TikvBrError
from tikv_br.retry import STORAGE_UNREACHABLE, Backoffer, RetryPolicy, in_background
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer, check_name, no_conditional_writes
from tikv_br.storage.outage import LocationHealth, health_of
from tikv_br.storage.request_failure import REFUSED_RANGE, CloudFailures, failure_of, server_message, uses_no_proxy
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutResult
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store


T = TypeVar("T")
CloudStore: TypeAlias = "S3Store | AzureStore | GCSStore"

PART_SIZE = 8 << 20
"""S3 and GCS allow 10,000 parts: objects up to 78 GiB; Azure 50,000."""
PARTS_WAITING = 1
PARTS_UPLOADING = 2
_PATIENCE = 0.1
"""Seconds after which a waiting writer looks whether the upload has failed."""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """Name and store of an object to upload, with the translation of its failures."""

    store: CloudStore
    name: str
    attributes: Attributes | None
    put: Callable[[bytes | bytearray], ObjectInfo]
    """Writes a small object in one request."""
    translate: Callable[[Exception], TikvBrError]
    watch: Callable[[float], None]
    """Called during a request with its start time; raises when waiting for the answer is pointless."""
    health: LocationHealth


class CloudWriter(Writer):
    """Holds back up to one part; an object no larger goes in one request, a larger one as a multipart upload.

    Keeps at most about ``2 + PARTS_WAITING + PARTS_UPLOADING`` parts in memory: `write` waits while the network is slower.
    An aborted upload leaves no parts behind; a killed process does, for the bucket's lifecycle rule to remove.
    """

    def __init__(self, target: UploadTarget) -> None:
        self._target = target
        self._buffer = bytearray()
        self._size = 0
        self._upload: _Upload | None = None
        self._finished = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._finished:
            raise ValueError(f"{self._target.name} is closed already")
        rest = memoryview(data).cast("B")
        self._size += len(rest)
        while rest:
            if len(self._buffer) == PART_SIZE:
                self._send_buffer()
            room = PART_SIZE - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]

    def close(self) -> ObjectInfo:
        if self._finished:
            raise ValueError(f"{self._target.name} is closed already")
        info = self._finish()
        self._finished = True
        return info

    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._buffer = bytearray()
        if self._upload is not None:
            self._upload.abort()

    def _finish(self) -> ObjectInfo:
        if self._upload is not None:
            self._send_buffer()
            return ObjectInfo(self._target.name, self._size, plain_etag(self._upload.result()["e_tag"]))
        return self._target.put(self._buffer)

    def _send_buffer(self) -> None:
        if self._upload is None:
            self._upload = _Upload(self._target)
        self._upload.send(self._buffer)
        self._buffer = bytearray()


class _Aborted(Exception):
    """Abort of an upload: ends obstore's pulling of parts, so that it removes those already uploaded."""


class _Upload:
    """A thread in which obstore pulls parts from a queue."""

    def __init__(self, target: UploadTarget) -> None:
        self._target = target
        self._queue: queue.Queue[bytearray | _Aborted | None] = queue.Queue(maxsize=PARTS_WAITING)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._result: PutResult | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"upload {target.name}", daemon=True)
        self._thread.start()

    def send(self, part: bytearray) -> None:
        """Hand over a part, waiting for room. Raises the error of an upload that has failed."""
        self._offer(part)
        if self._error is not None:
            raise self._target.translate(self._error)

    def result(self) -> PutResult:
        """Wait until everything sent is an object."""
        self._offer(None)
        while not self._ended.wait(_PATIENCE):
            self._target.watch(self._began)
        if self._result is None:
            raise self._target.translate(self._error or StorageError("the upload ended without a result"))
        return self._result

    def abort(self) -> None:
        """Wait until nothing sent is left, unless the location does not answer."""
        with suppress(queue.Empty):
            self._queue.get_nowait()
        self._queue.put(_Aborted())
        while not self._ended.wait(_PATIENCE) and self._target.health.is_answering:
            pass

    def _offer(self, item: bytearray | _Aborted | None) -> None:
        while not self._ended.is_set():
            try:
                self._queue.put(item, timeout=_PATIENCE)
            except queue.Full:
                self._target.watch(self._began)
                continue
            return

    def _run(self) -> None:
        target = self._target
        try:
            self._result = obstore.put(
                target.store,
                target.name,
                self._parts(),
                attributes=target.attributes,
                use_multipart=True,
                chunk_size=PART_SIZE,
                max_concurrency=PARTS_UPLOADING,
            )
            target.health.succeeded()
        except _Aborted:
            pass
        except (BaseError, OSError, ValueError) as error:
            self._error = error
        finally:
            self._ended.set()

    def _parts(self) -> Iterator[bytearray]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Aborted):
                raise item
            yield item


def plain_etag(etag: str | None) -> str:
    return (etag or "").strip('"')


CONDITIONAL_CONFLICT = "ConditionalRequestConflict"
"""Two conditional writes of one object met: neither need have succeeded, and both are to try again."""
CONNECT_TIMEOUT = timedelta(seconds=3)
FIRST_ANSWER_TIMEOUT = timedelta(seconds=4)
"""Timeout of a probe."""
SILENCE_TIMEOUT = timedelta(seconds=20)
"""Time without data after which a request fails, except for large writes."""
REQUEST_TIMEOUT = timedelta(minutes=2)
"""A request with its body, a part of an upload at most."""
LARGE_BYTES = 1 << 20
"""Larger writes may take `REQUEST_TIMEOUT`; whether the location answers is checked in the meantime."""
QUIET_SECONDS = 10.0
"""Seconds without any answer of the location during a large write before it is probed."""
_OWN_RETRIES = 1000
"""Maximum retries of obstore for parts of uploads: as many as fit in the patience."""
_CONFLICT_PAUSES = (0.05, 0.2, 0.8)
"""Seconds between tries of a conditional write that met another one."""
_REQUEST_FAILURES = (BaseError, OSError, ValueError)
"""Exceptions of obstore's requests: its own classes, and builtin ones for missing objects and bad ranges."""
_runtime_owner: int | None = None
_environment = threading.Lock()
"""Held while variables are hidden."""


class CloudObjectStore(CloudFailures, ObjectStore):
    """Objects in a bucket (Azure: a container) below a prefix.

    The first request of a process to a location is a probe, so that a wrong address is reported within seconds; from then on
    outages shorter than `StorageLocation.patience` are retried, see `tikv_br.storage.outage`.
    """

    _IGNORED_VARIABLES: ClassVar[frozenset[str]] = frozenset()
    """Variables by which obstore would overrule the location."""
    _lists_like = ""
    """Who lists what follows a name, so that the end of a listing can be verified by one more request; ``""`` = it is not."""

    def __init__(self, location: StorageLocation) -> None:
        super().__init__(location)
        self._patience = location.patience
        self._health = health_of(location.health_key)

    @abc.abstractmethod
    def _open(self, client: ClientConfig, retries: RetryConfig) -> CloudStore:
        """A client for the location."""

    def __reduce__(self) -> tuple[Callable[[StorageLocation], ObjectStore], tuple[StorageLocation]]:
        return (type(self), (self._location,))

    @property
    def location(self) -> StorageLocation:
        return self._location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        return self._put(name, data, "overwrite")

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """By a conditional request, again where another one was under way."""
        return self._put(name, data, "create")

    def get(self, name: str) -> bytes:
        return self._request("read", check_name(name), lambda store: obstore.get(store, name).bytes().to_bytes())

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""

        def read(store: CloudStore) -> bytes:
            try:
                return obstore.get_range(store, name, start=offset, length=length).to_bytes()
            except _REQUEST_FAILURES as error:
                if failure_of(error).status == REFUSED_RANGE:
                    return b""
                raise

        return self._request("read", check_name(name), read)

    def stat(self, name: str) -> ObjectInfo:
        def look(store: CloudStore) -> ObjectInfo:
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
        prefix = check_name(folder) if folder else None
        last: str | None = None
        verified: str | None = None
        again = False
        pages: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page(store: CloudStore) -> Sequence[ObjectMeta]:
            nonlocal pages, again
            if pages is None:  # at the beginning, after a failure, and at the end: behind what was listed
                again = last is not None
                pages = iter(obstore.list(store, prefix, offset=last))
            try:
                return next(pages, ())
            except _REQUEST_FAILURES:
                pages = None
                raise

        while True:
            for meta in (page := self._request("list", folder, next_page)):
                name = meta["path"]
                if again and last is not None and name <= last:
                    if self._lists_like and name < last:
                        raise self._incomplete_listing(last, name)
                    continue
                last = name
                yield _info(name, meta)
            if page:
                continue
            if not self._lists_like or last == verified:
                return
            # Servers without the continuation tokens of S3's second listing API end after their first page.
            verified, pages = last, None

    def _incomplete_listing(self, last: str, name: str) -> StorageError:
        return StorageError(
            f"{self._endpoint} does not list the {self._BUCKET} {self._location.bucket!r} as {self._lists_like} does: asked for what follows {last}, "
            f"it returned {name}, so that objects may be missing",
            hint="Use a server that supports start-after and continuation tokens of ListObjectsV2: backups here could be incomplete.",
        )

    def delete(self, name: str) -> None:
        def remove(store: CloudStore) -> None:
            try:
                obstore.delete(store, name)
            except FileNotFoundError as error:
                if not self._is_missing_object(failure_of(error)):
                    raise

        self._request("delete", check_name(name), remove)

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """Killed writers leave nothing but unfinished uploads."""

    def open_writer(self, name: str) -> Writer:
        check_name(name)
        self._wait_until_available()
        return CloudWriter(
            UploadTarget(
                self._upload_store,
                name,
                self._attributes(),
                lambda data: self._put(name, data, "overwrite"),
                lambda error: self._translate(error, "write", name),
                self._watch,
                self._health,
            )
        )

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self._health.outage.budget = self._patience
        with self._health.outage.working(self._is_answering):
            yield

    def _is_answering(self) -> bool:
        began = time.monotonic()
        try:
            _check_not_forked()
            problem = self._ask(None)
        except TikvBrError:  # a refusal is for the requests that need more than an answer
            problem = None
        if problem is not None:
            self._health.failed(began)
            return False
        self._health.succeeded()
        return True

    def _put(self, name: str, data: bytes | bytearray, mode: Literal["create", "overwrite"]) -> ObjectInfo:
        check_name(name)
        attributes = self._attributes()

        def write(store: CloudStore) -> PutResult:
            def once() -> PutResult:
                return obstore.put(store, name, data, mode=mode, attributes=attributes, use_multipart=False)

            if mode == "overwrite":
                return once()
            for pause in _CONFLICT_PAUSES:
                try:
                    return once()
                except _REQUEST_FAILURES as error:
                    failure = failure_of(error)
                    if failure.status == HTTPStatus.NOT_IMPLEMENTED:
                        said = f"does not support conditional writes (If-None-Match: {server_message(failure)})"
                        raise no_conditional_writes(self._location, said) from None
                    if failure.code != CONDITIONAL_CONFLICT:
                        raise
                time.sleep(pause)
            return once()

        def write_large(_store: CloudStore) -> PutResult:
            return in_background(lambda: write(self._large_store), f"write {name}", self._watch)

        send = write if len(data) < LARGE_BYTES else write_large
        result = self._request("write", name, send, repeatable=mode == "overwrite")
        return ObjectInfo(name, len(data), plain_etag(result["e_tag"]))

    def _request(self, action: str, name: str, send: Callable[[CloudStore], T], *, repeatable: bool = True) -> T:
        """Send a request on ``name`` until it is answered, and turn what it ends with into our errors.

        What is not ``repeatable`` is sent again only where the first certainly had no effect.
        """
        self._wait_until_available()
        patience = Backoffer(f"{action} {name}", RetryPolicy(self._patience, error=None, nested=False))
        while True:
            began = time.monotonic()
            try:
                with self._health.outage.asking():
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

    def _wait_until_available(self, problem: TikvBrError | None = None) -> None:
        """Return once the location answers; ``problem`` is what to report if it does not."""
        _check_not_forked()
        self._health.wait(lambda: self._ask(problem), self._patience)

    def _ask(self, problem: TikvBrError | None) -> TikvBrError | None:
        """Send a probe; returns None, or its error. Raises permanent errors."""
        try:
            answer = obstore.get(self._probe_store, "backupmeta")
        except _REQUEST_FAILURES as error:
            failure = failure_of(error)
            if failure.is_transient:
                return problem or self._translate(error, "read", "backupmeta")
            if not failure.answered or failure.is_page:
                raise self._translate(error, "read", "backupmeta") from None
        else:
            if str(answer.attributes.get("Content-Type", "")).startswith("text/html"):
                raise self._no_storage("cannot read backupmeta", "HTTP 200, a page of HTML")
        return None

    def _watch(self, began: float) -> None:
        """During a large write: raise `StorageAway` once the location has been unavailable for longer than the patience."""
        cancellation.check()
        if self._health.quiet_seconds(began) > QUIET_SECONDS:
            self._health.failed(began)
        self._wait_until_available()

    def _attributes(self) -> Attributes | None:
        return {"Storage-Class": self._location.options.storage_class} if self._location.options.storage_class else None

    @functools.cached_property
    def _store(self) -> CloudStore:
        silence = min(SILENCE_TIMEOUT, max(timedelta(seconds=self._patience), FIRST_ANSWER_TIMEOUT))
        return self._client({"timeout": REQUEST_TIMEOUT, "read_timeout": silence})

    @functools.cached_property
    def _probe_store(self) -> CloudStore:
        return self._client({"timeout": FIRST_ANSWER_TIMEOUT})

    @functools.cached_property
    def _large_store(self) -> CloudStore:
        """Client for objects of `LARGE_BYTES`."""
        return self._client({"timeout": REQUEST_TIMEOUT})

    @functools.cached_property
    def _upload_store(self) -> CloudStore:
        """Client for parts of uploads, which obstore retries."""
        retries: RetryConfig = {
            "max_retries": _OWN_RETRIES,
            "retry_timeout": timedelta(seconds=self._patience),
            "backoff": {"max_backoff": timedelta(seconds=STORAGE_UNREACHABLE.cap)},
        }
        return self._client({"timeout": REQUEST_TIMEOUT}, retries)

    def _client(self, timeouts: ClientConfig, retries: RetryConfig | None = None) -> CloudStore:
        client: ClientConfig = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, **timeouts}
        if uses_no_proxy():  # the client takes the ``*`` of NO_PROXY for names only, not for addresses
            client |= {"proxy_url": "http://none", "proxy_excludes": "*,0.0.0.0/0,::/0"}
        try:
            with _hidden(self._IGNORED_VARIABLES):
                return self._open(client, retries or {"max_retries": 0, "retry_timeout": REQUEST_TIMEOUT})
        except BaseError as error:  # credentials of the environment that are none
            cause = str(error).partition("\n")[0].partition(" error: ")[2] or str(error)
            text = f"the credentials for {self._endpoint} cannot be used: {cause}"
            raise StorageDenied(text, hint=self._CREDENTIALS_HINT) from None


def _info(name: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], plain_etag(meta["e_tag"]), int(meta["last_modified"].timestamp() * 1000))


@contextmanager
def _hidden(variables: Iterable[str]) -> Iterator[None]:
    """Without these variables of the environment: obstore reads some that no argument of its own can overrule."""
    with _environment:
        found = {name: os.environ.pop(name) for name in variables if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(found)


def _check_not_forked() -> None:
    """Refuse to work in a child forked after obstore's threads were started: there it would wait forever."""
    global _runtime_owner  # noqa: PLW0603  # the threads are the process's
    if _runtime_owner not in {None, os.getpid()}:
        raise StorageError(
            "object storage was used in this process's parent before the fork",
            hint="Start processes with spawn, or use it only in the child processes.",
        )
    _runtime_owner = os.getpid()
