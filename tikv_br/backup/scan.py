"""The task of the scan engine: scans one interval page by page, converts the rows, and writes the files."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import grpc
import numpy as np
import pyarrow as pa

from tikv_br.backup.convert import BatchStats, Converter
from tikv_br.backup.data_files import DataFiles, RegionCounts
from tikv_br.backup.plan import cut_at
from tikv_br.backup.task import BackupJob, PhaseSeconds, Task, TaskResult, try_task
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.cancellation import inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import check_get_ttl
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import ClusterError
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.columns import Flags, Numbers
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage, ScanPage
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.tasks.task import TaskContext

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates over ``items`` in a separate thread, one item ahead of the consumer.

    Errors of ``items`` are raised in the consumer. A consumer that stops early waits for the item in progress.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.seconds = 0.0
        """Time spent producing items, in their thread."""
        self.seconds_waiting = 0.0
        """Time that the consumer has waited for items."""
        self._items = items
        self._stopped = False

    def stop(self) -> None:
        """Produce no further items after the one in progress."""
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
            fetch_next = inherit(self._next)
            pending: Future[T | None] | None = pool.submit(fetch_next)
            while pending is not None and (item := self._wait(pending)) is not None:
                pending = None if self._stopped else pool.submit(fetch_next)
                yield item

    def _wait(self, pending: Future[T | None]) -> T | None:
        began = time.perf_counter()
        try:
            return pending.result()
        finally:
            self.seconds_waiting += time.perf_counter() - began

    def _next(self) -> T | None:
        began = time.perf_counter()
        try:
            return next(self._items, None)
        finally:
            self.seconds += time.perf_counter() - began


IN_FLIGHT = 256
"""Maximum number of requests in flight; each is a few hundred bytes."""
MIN_IN_FLIGHT = 16
"""Number of requests in flight if stores are slow."""
WAITING_SECONDS = 0.5
"""A request that takes this much longer than the fastest of its page has waited behind others."""
LAST_EXPIRY = (1 << 64) - 1
"""Largest expiry; stores cap the sum of time and TTL there."""

_Answer: TypeAlias = "grpc.Future[kvrpcpb_pb2.RawGetKeyTTLResponse]"


@dataclass(slots=True, eq=False)
class _Request:
    """A request in flight."""

    row: int
    key: bytes
    is_retry: bool
    sent: float = 0.0
    """Time of sending, by `time.monotonic`."""
    received: float = 0.0
    """Time of arrival of the answer, which may be long before it is read; 0 = not yet."""
    answer: _Answer | None = None
    """None if the request could not be sent."""

    def mark_received(self, _answer: object) -> None:
        """Callback for gRPC: the answer has arrived."""
        self.received = time.monotonic()

    @property
    def seconds(self) -> float:
        """Round-trip time."""
        return self.received - self.sent


class _Expiry(NamedTuple):
    """The expiry of a row: the real one is between ``expire_ts`` and ``expire_ts + error``."""

    expire_ts: int
    """Seconds since the epoch; 0 = never."""
    error: int
    """Seconds."""


class PdClock:
    """The cluster's wall clock, read from PD: likely closer to the stores' clocks than this machine's."""

    def __init__(self, fetch_tso: Callable[[], int]) -> None:
        """Read the clock once; the time that takes is the uncertainty."""
        began = time.monotonic()
        physical = physical_ms(fetch_tso()) / 1000
        self._least = physical - time.monotonic()
        self._most = physical - began

    def expiry(self, ttl: int, sent: float, received: float) -> _Expiry:
        """The expiry of a row with this TTL (0 = never), from a request that was in flight from ``sent`` to ``received``.

        The store read its clock in between. Counted from the time of sending, the expiry is never too late. It is capped at
        `LAST_EXPIRY`, as in the store.
        """
        if not ttl:
            return _Expiry(0, 0)
        first, last = int(self._least + sent), int(self._most + received)
        return _Expiry(min(first + ttl, LAST_EXPIRY), last - first)


class TtlFetcher:
    """Fetches the TTLs of ascending keys. For one thread. Raises `DangerousRequest` for a cluster without TTLs.

    The error of an expiry is the duration of its request. If requests queue at a slow store, fewer are kept in flight, and
    those that queued are sent once more.
    """

    def __init__(self, cluster: Cluster, raw: RawClient) -> None:
        check_get_ttl(raw.codec.api_version)
        self._cluster = cluster
        self._raw = raw
        self._clock = PdClock(cluster.pd.tso)
        self._region: Region | None = None
        self._region_end = b""
        self._window = float(MIN_IN_FLIGHT)
        self._fastest = math.inf
        self._shrunk = 0
        """Outstanding answers to requests that were sent before the window last shrank."""
        self.error_seconds = 0
        """Maximum number of seconds by which an expiry so far may be too early."""

    def fetch(self, keys: pa.LargeBinaryArray) -> tuple[Numbers, Flags]:
        """The expiry of each RPC key, in seconds since the epoch (0 = never), and whether the key still exists.

        Raises `ClusterError` if a key's request fails after its retries.
        """
        expiries: list[_Expiry | None] = [None] * len(keys)
        pending: deque[_Request] = deque()
        self._fastest = math.inf

        def receive_first() -> None:
            request = pending.popleft()
            expiry = self._expiry(request)
            earlier = expiries[request.row]
            if expiry is not None and earlier is not None:
                expiry = min(expiry, earlier, key=lambda each: each.error)
            expiries[request.row] = expiry
            waited = self._adapt(request, len(pending))
            if waited and not request.is_retry and expiry is not None and expiry.error:
                pending.append(self._send(request.row, request.key, is_retry=True))

        for row, key in enumerate(keys.to_pylist()):
            while len(pending) >= int(self._window):
                receive_first()
            pending.append(self._send(row, key))
        while pending:
            receive_first()
        found = [each for each in expiries if each is not None]
        self.error_seconds = max(self.error_seconds, max((each.error for each in found), default=0))
        there = np.array([each is not None for each in expiries], np.bool_)
        expire_ts = np.array([0 if each is None else each.expire_ts for each in expiries], np.uint64)
        return expire_ts, there

    def _adapt(self, request: _Request, pending: int) -> bool:
        """Adapt the window to the duration of a request while ``pending`` others are in flight; returns whether it has queued."""
        if not request.received:  # it failed
            return False
        self._fastest = min(self._fastest, request.seconds)
        waited = request.seconds > self._fastest + WAITING_SECONDS
        if self._shrunk:
            self._shrunk -= 1
        elif waited:
            self._window = max(self._window / 2, MIN_IN_FLIGHT)
            self._shrunk = pending
        else:
            self._window = min(self._window + 1, IN_FLIGHT)
        return waited

    def _send(self, row: int, key: bytes, *, is_retry: bool = False) -> _Request:
        request = _Request(row, key, is_retry)
        try:
            region = self._region_of(key)
            store = self._cluster.store(region.leader.store_id)
        except ClusterError:
            return request
        context = region.context(self._raw.codec.api_version, self._cluster.cluster_id)
        message = kvrpcpb_pb2.RawGetKeyTTLRequest(context=context, key=key)
        request.sent = time.monotonic()
        request.answer = store.kv.RawGetKeyTTL.future(message, timeout=self._cluster.config.request_timeout)
        request.answer.add_done_callback(request.mark_received)
        return request

    def _expiry(self, request: _Request) -> _Expiry | None:
        """The expiry from the answer; None if the key does not exist. Repeats a failed request, with retries."""
        try:
            if request.answer is not None:
                answer = request.answer.result()
                if not answer.HasField("region_error") and not answer.error:
                    request.received = request.received or time.monotonic()
                    return None if answer.not_found else self._clock.expiry(answer.ttl, request.sent, request.received)
        except grpc.RpcError:
            pass
        self._region, request.received = None, 0.0
        left = self._raw.get_timed_ttl(self._raw.codec.user_key(request.key))
        return None if left is None else self._clock.expiry(*left)

    def _region_of(self, key: bytes) -> Region:
        """The key's region; looked up only if the key is beyond the last one."""
        if self._region is None or (self._region_end and key >= self._region_end):
            codec = self._raw.codec
            self._region = self._cluster.regions.locate(codec.bound(key))
            try:
                self._region_end = codec.from_bound(self._region.end)
            except DamagedBytes:  # a bound that is not an encoded key: use the region for this key only
                self._region_end = key + b"\0"
        return self._region


PROBE_BYTES = 32 << 20
"""After this many bytes of a task it is known how much of its time it waits for pages."""
MAX_PARALLEL_SCANS = 4
"""Maximum number of parallel scans of a task. Each holds its own pages and file buffers in memory."""

ScanPart = Callable[[KeyRange], Iterator[RawPage]]


@dataclass(frozen=True, slots=True)
class RemainingRange:
    """The rest of a range, and the number of scans that should copy it in parallel."""

    part: KeyRange
    parallel: int


class ScanProbe:
    """Measures at the start of a task how much of its time it waits for pages, leaving out the small first ones."""

    def __init__(self, pages: Prefetcher[RawPage]) -> None:
        self._pages = pages
        self._began = self._waited = 0.0

    def parallel_scans(self, copied: int) -> int:
        """How many parallel scans keep the processor busy; 0 = not known before `PROBE_BYTES` are ``copied``."""
        now, waited = time.perf_counter(), self._pages.seconds_waiting
        if copied < PROBE_BYTES // 4:
            self._began, self._waited = now, waited
        if copied < PROBE_BYTES:
            return 0
        waited -= self._waited
        return min(MAX_PARALLEL_SCANS, 1 + int(waited / max(now - self._began - waited, 1e-6)))


@dataclass(slots=True)
class RangeScan:
    """Copies a part of the interval: scans it page by page, one page ahead, converts the rows and writes files. For one thread."""

    part: KeyRange
    files: DataFiles
    converter: Converter
    context: TaskContext
    regions: RegionCounts
    scan: ScanPart
    ttls: TtlFetcher | None
    """Fetches each row's expiry; None if rows have none."""
    source: Checksum = field(default_factory=Checksum)
    vanished: int = 0
    dropped_ttls: int = 0
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)

    def copy(self, *, probe: bool, failed: threading.Event | None = None) -> RemainingRange | None:
        """Copy the range. With ``probe``, stop as soon as parallel scans would be faster, and return the remaining range.

        Ends early if ``failed`` is set.
        """
        pages = Prefetcher(self.scan(self.part))
        scan_probe = ScanProbe(pages) if probe else None
        rest = None
        for page in pages:
            self._copy_page(page)
            if failed and failed.is_set():
                break
            if scan_probe and not rest and (parallel := scan_probe.parallel_scans(self.source.total_bytes)) > 1:
                pages.stop()
                rest = RemainingRange(self.part, parallel)
            if rest:
                rest = RemainingRange(KeyRange(page.last_key + b"\0", self.part.end), rest.parallel)
        self.seconds.scan += pages.seconds
        return rest

    def narrow(self, part: KeyRange) -> None:
        """Continue with this part of the range only."""
        self.part = part
        self.files.narrow(self.converter.target_range(part).end)
        self.regions.narrow(part.end)

    def _copy_page(self, page: RawPage) -> None:
        if self.ttls is not None:
            self._copy_expiring(page.split(), page.first_key, self.ttls)
            return
        began = time.perf_counter()
        counted = self.files.add_page(page)
        self.regions.add(page.first_key, counted.target)
        self._count(counted, PhaseSeconds(encode=time.perf_counter() - began))

    def _copy_expiring(self, page: ScanPage, first_key: bytes, ttls: TtlFetcher) -> None:
        import pyarrow as pa

        marks = [time.perf_counter()]
        expire_ts, there = ttls.fetch(page.keys)
        mask = pa.array(there)
        page, expire_ts = ScanPage(page.keys.filter(mask), page.values.filter(mask)), expire_ts[there]
        self.vanished += len(there) - len(expire_ts)
        marks.append(time.perf_counter())
        if len(page.keys):
            converted = self.converter.convert_page(page, expire_ts)
            marks.append(time.perf_counter())
            self.files.add(converted)
            marks.append(time.perf_counter())
            self.regions.add(first_key, converted.target)
            ttl, convert, encode = (after - before for before, after in pairwise(marks))
            self._count(converted, PhaseSeconds(ttl=ttl, convert=convert, encode=encode))

    def _count(self, rows: BatchStats, seconds: PhaseSeconds) -> None:
        """Add a page's rows and times to the totals."""
        self.source += rows.source
        self.dropped_ttls += rows.dropped_ttls
        self.seconds.add(seconds)
        self.context.report(data_bytes=rows.source.total_bytes, keys=rows.source.total_kvs)


def copy_parallel(scans: Sequence[RangeScan]) -> None:
    """Run all scans in parallel. Raises the first error, once all scans have stopped."""
    failed = threading.Event()

    def copy(scan: RangeScan) -> None:
        try:
            scan.copy(probe=False, failed=failed)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(scans), thread_name_prefix="scan") as pool:
        try:
            for done in as_completed([pool.submit(inherit(copy), scan) for scan in scans]):
                done.result()
        finally:
            failed.set()


def split_range(rest: KeyRange, starts: Sequence[bytes], count: int) -> list[KeyRange]:
    """Split a range into at most ``count`` parts at some of the ascending ``starts``, with about equally many regions each."""
    inside = [start for start in starts if start > rest.start and (not rest.end or start < rest.end)]
    count = min(count, len(inside) + 1)
    cuts = [inside[len(inside) * number // count] for number in range(1, count)]
    return [KeyRange(start, end) for start, end in pairwise([rest.start, *cuts, rest.end])]


def run_scan_task(job: BackupJob, task: Task, context: TaskContext) -> TaskResult:
    """Copy one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    options, clusters = job.options, context.shared(ClusterPool)
    return try_task(
        lambda: _Attempt(job, task, context, clusters.get(options.cluster), open_store(options.storage)).run()
    )


@dataclass(slots=True)
class _Attempt:
    """One attempt at a task."""

    job: BackupJob
    task: Task
    context: TaskContext
    cluster: Cluster
    store: ObjectStore
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    scans: list[RangeScan] = field(default_factory=list)

    def run(self) -> TaskResult:
        """Write the files and the ledger entry; after an error the files are removed."""
        converter = self.job.conversion.of(self.task.interval)
        raw = RawClient(self.cluster.router, converter.source, self.cluster.cluster_id)
        try:
            rest = self._add_scan(raw, converter, self.task.interval).copy(probe=not self.job.rate_limit)
            if rest is not None:
                self._copy_rest(raw, converter, rest)
            return self._finish()
        except BaseException:
            for scan in self.scans:
                scan.files.abandon()
            source = self._source
            self.context.retract(data_bytes=source.total_bytes, keys=source.total_kvs)
            raise

    def _copy_rest(self, raw: RawClient, converter: Converter, rest: RemainingRange) -> None:
        """Continue with the first scan and, if the rest has enough regions, with further ones in parallel."""
        codec, part = converter.source, rest.part
        regions = self.cluster.pd.scan_regions(codec.bound(part.start), codec.bound(part.end))
        parts = split_range(part, [cut_at(region.start, codec) for region in regions], rest.parallel)
        self.scans[0].narrow(parts[0])
        for part in parts[1:]:
            self._add_scan(raw, converter, part)
        copy_parallel(self.scans)

    def _add_scan(self, raw: RawClient, converter: Converter, part: KeyRange) -> RangeScan:
        job = self.job
        files = DataFiles(
            self.store,
            self.task.interval,
            f"{self.name}_{len(self.scans)}" if self.scans else self.name,
            converter,
            job.options,
            part,
        )
        scan = RangeScan(
            part,
            files,
            converter,
            self.context,
            RegionCounts(self.cluster.regions, converter, part),
            lambda part: raw.scan_raw_pages(part.start, part.end, rate_limit=job.rate_limit),
            TtlFetcher(self.cluster, raw) if job.with_ttl else None,
        )
        self.scans.append(scan)
        return scan

    def _finish(self) -> TaskResult:
        began = time.perf_counter()
        entry = LedgerEntry(
            self.task.start,
            self.task.end,
            self.name,
            tuple(file for scan in self.scans for file in scan.files.finish()),
            source=self._source,
            vanished=sum(scan.vanished for scan in self.scans),
            dropped_ttls=sum(scan.dropped_ttls for scan in self.scans),
            expiry_error_seconds=max(scan.ttls.error_seconds if scan.ttls else 0 for scan in self.scans),
            run=self.job.run,
            regions=tuple(region for scan in self.scans for region in scan.regions.parts()),
        )
        write_entry(self.store, entry)
        uploading = sum(scan.files.seconds_uploading for scan in self.scans)
        seconds = PhaseSeconds(encode=time.perf_counter() - began - uploading, upload=uploading)
        for scan in self.scans:
            seconds.add(scan.seconds)
        return TaskResult(FinishedTask.of(entry), seconds)

    @property
    def _source(self) -> Checksum:
        """Sums of all rows so far."""
        return sum((scan.source for scan in self.scans), Checksum())
