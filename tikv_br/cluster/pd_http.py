"""PD's HTTP API: calls that its gRPC API lacks, and the status of the cluster."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, cast
from urllib.parse import quote

import orjson
from msgspec import Struct

from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.pd_connection import Leader, PdConnection
from tikv_br.cluster.regions import RegionColumns
from tikv_br.errors import ClusterError, ClusterTlsError, ClusterUnreachable, RequestRefused

TEXT_SHOWN = 200
"""Characters of an error page that a message quotes."""


def request_json(method: str, url: str, tls: TlsFiles, timeout: float, payload: object = None) -> object:
    """Send `payload` as JSON, if any, and return the answer's JSON; None for an empty answer.

    Raises `ClusterUnreachable` (also for 5xx), `ClusterTlsError`, or `RequestRefused` for any other failure.
    """
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})  # noqa: S310 - the scheme is ours
    try:
        with _opener(tls).open(request, timeout=timeout) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _http_error(url, error.code, error.read(TEXT_SHOWN).decode(errors="replace")) from None
    except urllib.error.URLError as error:
        raise _connection_error(url, error.reason) from None
    except (OSError, HTTPException) as error:
        raise _connection_error(url, error) from None
    try:
        return orjson.loads(body) if body.strip() else None
    except orjson.JSONDecodeError:
        raise RequestRefused(f"{url}: the response is not JSON: {body[:TEXT_SHOWN]!r}") from None


def _opener(tls: TlsFiles) -> urllib.request.OpenerDirector:
    """Opener that ignores proxies of the environment: a cluster's servers are reached directly."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls.enabled:
        handlers.append(urllib.request.HTTPSHandler(context=tls.ssl_context()))
    return urllib.request.build_opener(*handlers)


def _http_error(url: str, code: int, text: str) -> ClusterError:
    error_class = ClusterUnreachable if code >= HTTPStatus.INTERNAL_SERVER_ERROR else RequestRefused
    return error_class(f"{url}: HTTP {code}: {text.strip()}")


def _connection_error(url: str, reason: object) -> ClusterError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return ClusterTlsError(f"{url}: the certificate is not trusted: {reason.verify_message}")
    if isinstance(reason, ssl.SSLError):
        return ClusterTlsError(f"{url}: the TLS handshake failed: {reason.reason or reason}")
    return ClusterUnreachable(f"{url}: {reason}")


API = "/pd/api/v1"
MIB = 1 << 20
_SILENT = {"Disconnected", "Down"}


REGION_PAGE = 2048
"""Regions in one answer, about 600 bytes each; PD gives at most 10,240."""


class PdHttp:
    """PD's leader over HTTP. Every call raises `ClusterError` after ``config.retry_budget`` seconds of failures."""

    def __init__(self, connection: PdConnection) -> None:
        self._connection = connection

    def cluster_version(self) -> str:
        """The version that all stores have at least, such as ``8.5.2``."""
        version = self._request("GET", "/config/cluster-version")
        if not isinstance(version, str):
            raise RequestRefused(f"PD: the cluster version is not a string: {version!r}")
        return version.removeprefix("v")

    def regions(self, start: bytes, end: bytes) -> RegionColumns:
        """Starts and estimated sizes of the regions that overlap ``[start, end)``, physical bounds as PD holds them, page by page.

        Sizes are some seconds old and in whole MiB, so often 0. A region that PD does not know, as after a change of its
        leader, is missing; so this is for estimates, `PdClient.scan_regions` for routing.
        """
        return RegionColumns.of(self._region_pages(start, end))

    def _region_pages(self, start: bytes, end: bytes) -> Iterator[tuple[list[bytes], list[int]]]:
        last = quote(end, safe="")
        while True:
            path = f"/regions/key?key={quote(start, safe='')}&end_key={last}&limit={REGION_PAGE}"
            document = cast("dict[str, Any]", self._request("GET", path))
            found = ((bytes.fromhex(each["start_key"]), each) for each in document.get("regions") or ())
            page = sorted(found, key=lambda each: each[0])
            if not page:
                return
            yield [key for key, _ in page], [each.get("approximate_size", 0) * MIB for _, each in page]
            reached = bytes.fromhex(page[-1][1].get("end_key", ""))
            if reached <= start or (end and reached >= end):  # empty: the end of all keys
                return
            start = reached

    def silent_stores(self) -> frozenset[int]:
        """Ids of the stores that PD has not heard of for 20 s or more, though it had before.

        A store that has just started counts as down, too, until its first heartbeat; such a one is not meant here.
        """
        document = cast("dict[str, Any]", self._request("GET", "/stores"))
        return frozenset(
            item["store"]["id"]
            for item in document.get("stores") or ()
            if item["store"].get("state_name") in _SILENT
            and not _is_zero_time(item["status"].get("last_heartbeat_ts", ""))
        )

    def schedulers(self, *, paused: bool = False) -> list[str]:
        """Names of the schedulers that PD has, or of those among them that are paused."""
        path = "/schedulers?status=paused" if paused else "/schedulers"
        return list(cast("Sequence[str]", self._request("GET", path) or ()))

    def pause_scheduler(self, name: str, seconds: int) -> None:
        """Pause a scheduler for `seconds`; 0 resumes it."""
        self._request("POST", f"/schedulers/{quote(name, safe='')}", {"delay": seconds})

    def document(self, path: str) -> object:
        """The JSON document at a path below ``/pd/api/v1``."""
        return self._request("GET", path)

    def _request(self, method: str, path: str, payload: object = None) -> object:
        connection, tls = self._connection, self._connection.config.tls

        def send(leader: Leader) -> object:
            url = f"{tls.scheme}://{leader.address}{API}{path}"
            try:
                return request_json(method, url, tls, connection.request_seconds, payload)
            except ClusterUnreachable:
                connection.outage.fail()
                raise

        return connection.call(send, f"PD {path.partition('?')[0]}")


def _is_zero_time(heartbeat: str) -> bool:
    """Return whether a store has never sent a heartbeat: PD writes the zero time in several forms."""
    return heartbeat[:4] in {"", "0001", "1970"}


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTPE]?)(?:i?B)?")
_POWERS = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
GC_WORKER = "gc_worker"
"""The name under which GC itself has an entry among the services."""


class StoreStatus(Struct, frozen=True):
    """A store that is not gone for good, as PD hears of it."""

    id: int
    address: str
    version: str
    """Version without the leading ``v``."""
    state: str
    """``Up``, ``Offline`` (on its way out), ``Disconnected`` (20 s of silence) or ``Down`` (half an hour)."""
    capacity: int
    """Bytes of its disk; 0 = PD does not know."""
    available: int
    """Free bytes."""
    is_tiflash: bool


class ServiceSafePoint(Struct, frozen=True):
    """A service's safe point, which GC does not pass."""

    service: str
    safe_point: int
    expires: int
    """Seconds since the epoch."""


class GcBarrier(Struct, frozen=True):
    """A global or keyspace-level GC barrier, which the HTTP API does not list."""

    name: str
    ts: int
    ttl: int
    """Seconds from the answer on; a very large number = no expiry."""
    keyspace_id: int | None
    """None: it holds the GC of the whole cluster."""


class GcStatus(Struct, frozen=True):
    """GC's safe point and the service safe points and barriers that limit it."""

    safe_point: int
    services: tuple[ServiceSafePoint, ...]
    """Service safe points, without GC's own."""
    worker: int = 0
    """The safe point that the GC worker has asked for: PD refuses a new service below it, unless an older service is below it."""
    has_barriers: bool = False
    """True if PD has GC barriers, which `worker` never passes; read them with `PdClient.gc_barriers`."""
    barriers: tuple[GcBarrier, ...] = ()
    """Global and keyspace-level ones."""
    unlisted: str = ""
    """Reason why `barriers` is unknown; empty if it is known."""

    def refuses_below(self, now: float) -> int:
        """The lowest safe point that PD accepts from a new service; `now` is in seconds since the epoch."""
        held = [each.safe_point for each in self.services if each.expires > now]
        return max(self.safe_point, min([self.worker, *held]))


def store_statuses(pd: PdHttp) -> list[StoreStatus]:
    """All stores, TiFlash too."""
    return [_store(item) for item in _object(pd, "/stores").get("stores") or ()]


def free_space(pd: PdHttp, store_id: int) -> str:
    """The space on a store's disk, as a part of a message; empty if PD does not answer, or does not know it."""
    with contextlib.suppress(ClusterError):
        for store in store_statuses(pd):
            if store.id == store_id and store.capacity:
                return f" ({store.available >> 20:,} of {store.capacity >> 20:,} MiB free by PD's last figures)"
    return ""


def member_health(pd: PdHttp) -> dict[str, bool]:
    """Return the health of each PD member by name."""
    members = cast("Iterable[dict[str, Any]]", pd.document("/health") or ())
    return {str(member.get("name", "")): bool(member.get("health")) for member in members}


def gc_status(pd: PdHttp) -> GcStatus:
    """The safe points of GC and of services."""
    document = _object(pd, "/gc/safepoint")
    services = (
        ServiceSafePoint(item["service_id"], int(item["safe_point"]), int(item["expired_at"]))
        for item in document.get("service_gc_safe_points") or ()
    )
    entries = tuple(services)
    held = tuple(each for each in entries if each.service != GC_WORKER)
    worker = max((each.safe_point for each in entries if each.service == GC_WORKER), default=0)
    return GcStatus(int(document.get("gc_safe_point", 0)), held, worker)


def merges_regions(pd: PdHttp) -> bool:
    """Return whether PD merges small regions; import tools disable it temporarily with a size of 0."""
    return int(_object(pd, "/config/schedule").get("max-merge-region-size", 1)) > 0


def parse_size(text: str) -> int:
    """Bytes of ``1.8TiB``, ``98.2GiB`` or ``0B``, as PD writes them. Raises `RequestRefused`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RequestRefused(f"PD: {text!r} is not a size")
    return int(float(found[1]) * 1024 ** _POWERS[found[2]])


def _store(item: dict[str, Any]) -> StoreStatus:
    store, status = item["store"], item.get("status") or {}
    labels = {(label.get("key"), label.get("value")) for label in store.get("labels") or ()}
    return StoreStatus(
        id=int(store["id"]),
        address=str(store.get("address", "")),
        version=str(store.get("version", "")).removeprefix("v"),
        state=str(store.get("state_name", "")),
        capacity=parse_size(str(status.get("capacity", "0B"))),
        available=parse_size(str(status.get("available", "0B"))),
        is_tiflash=bool({("engine", "tiflash"), ("engine", "tiflash_compute")} & labels),
    )


def _object(pd: PdHttp, path: str) -> dict[str, Any]:
    document = pd.document(path)
    if not isinstance(document, dict):
        raise RequestRefused(f"PD {path}: the response is not a JSON object")
    return document
