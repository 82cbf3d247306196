"""Uploads a large object to a cloud: parts are sent while the next ones are written."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import obstore
from obstore.exceptions import BaseError

from tikv_br.errors import StorageError, TikvBrError
from tikv_br.storage.base import ObjectInfo, Writer
from tikv_br.storage.outage import LocationHealth

if TYPE_CHECKING:
    from obstore import Attributes, PutResult
    from obstore.store import AzureStore, GCSStore, S3Store

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
