"""The task of the store engine: has the stores that lead the interval's regions write SSTs, and records them in the ledger.

Regions that move, split or merge during the backup leave gaps between the answers; the gaps are requested again from the
current leaders. Every request writes into a separate folder, so that a late or repeated write never replaces the files of
another request. Runs in a thread of the driver or in a Spark Python worker.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from tikv_br import retry
from tikv_br.backup.store_files import FileRecorder, RewriteTotals, rewrite_files
from tikv_br.backup.store_responses import (
    STORAGE_ERROR,
    STORES_WRITE_HINT,
    AnswerStream,
    GatedStream,
    ResponseSet,
    RetryAdvice,
    StoreAnswer,
    StoredSst,
    classify_error,
    longest_wait,
    read_all,
)
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.cancellation import inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import LONG_FACTOR, StoreClient
from tikv_br.dataflow.plan import cut_at
from tikv_br.dataflow.task import BackupJob, PhaseSeconds, TaskResult, try_task
from tikv_br.dataflow.write import DataFiles, part_of
from tikv_br.errors import (
    ClusterError,
    ClusterUnreachable,
    RequestRefused,
    StorageError,
)
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.sst.compression import Compression
from tikv_br.retry import Backoffer
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.credentials import to_backend, to_cipher_info
from tikv_br.storage.local import to_storage_error
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import patience_policy
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

_COMPRESSION = {
    Compression.SNAPPY: brpb_pb2.SNAPPY,
    Compression.LZ4: brpb_pb2.LZ4,
    Compression.ZSTD: brpb_pb2.ZSTD,
}


@dataclass(frozen=True, slots=True)
class StoreRange:
    """The range of a request to one store: RPC keys of the source, never empty."""

    store_id: int
    range: KeyRange


def store_ranges(gap: KeyRange, regions: Iterable[Region], codec: KeyCodec) -> list[StoreRange]:
    """Return one range per leader of the ascending ``regions``: from its first to its last region in the gap.

    Stores skip regions that they do not lead, so one wide request is cheaper than many small ones.
    """
    found: dict[int, KeyRange] = {}
    for region in regions:
        part = intersection(gap, KeyRange(cut_at(region.start, codec), cut_at(region.end, codec)))
        if part.is_empty:
            continue
        known = found.get(region.leader.store_id)
        found[region.leader.store_id] = part if known is None else KeyRange(known.start, part.end)
    return [StoreRange(store_id, part) for store_id, part in found.items()]


def request(
    span: KeyRange,
    cluster_id: int,
    target: KeyCodec,
    compression: Compression,
    level: int,
    concurrency: int,
    rate_limit: int = 0,
) -> brpb_pb2.BackupRequest:
    """The request, without its storage. ``target`` is the encoding of the files, even if it is the source's.

    ``rate_limit`` applies to this request alone, in bytes per second; 0 = unlimited.
    """
    return brpb_pb2.BackupRequest(
        cluster_id=cluster_id,
        start_key=span.start,
        end_key=span.end,
        is_raw_kv=True,
        cf="default",
        dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(target.api_version),
        compression_type=_COMPRESSION[compression],
        compression_level=level,
        concurrency=concurrency,
        rate_limit=rate_limit,
    )


log = logging.getLogger(__name__)
UNANSWERED_BYTES = 1 << 30
"""Bytes that a store may write, for several regions at once, before its first response."""


INTERMEDIATE_COMPRESSION = Compression.LZ4
"""Compression of stores' files that are rewritten and then removed."""


def run_store_task(job: BackupJob, interval: KeyRange, context: TaskContext) -> TaskResult:
    """Back up one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    options, clusters = job.options, context.shared(ClusterPool)
    return try_task(
        context,
        lambda: _StoreAttempt(job, interval, context, clusters.get(options.cluster), open_store(options.storage)).run(),
    )


class _StoreAttempt:
    def __init__(
        self, job: BackupJob, interval: KeyRange, context: TaskContext, cluster: Cluster, store: ObjectStore
    ) -> None:
        self._job = job
        self._options = job.options
        self._interval = interval
        self._context = context
        self._cluster = cluster
        self._store = store
        self._name = secrets.token_hex(8)
        self._converter = job.conversion.of(interval)
        """Converter from the cluster's encoding to the backup's."""
        self._stores_converter = job.conversion.unchanged.of(interval) if job.rewrites_files else self._converter
        """Converter to the encoding of the stores' files."""
        self._folder = layout.store_folder(interval, self._name)
        self._answers = ResponseSet(interval)
        self._rewritten: DataFiles | None = None
        self._requests = 0

    def run(self) -> TaskResult:
        """Write the files and the ledger entry; after an error the files are removed."""
        began = time.perf_counter()
        try:
            self._collect_answers()
            written = time.perf_counter()
            entry = self._rewrite() if self._job.rewrites_files else self._record()
            self._remove_files(keep={file.name for file in entry.files})
            write_entry(self._store, entry)
        except BaseException:
            if self._rewritten is not None:
                self._rewritten.abandon()
            self._remove_files(keep=set())
            raise
        seconds = PhaseSeconds(store=written - began, inspect=time.perf_counter() - written)
        return TaskResult(FinishedTask.of(entry), seconds)

    def _collect_answers(self) -> None:
        """Send requests until the answers cover the interval. Raises `RetryBudgetExhausted` if the gaps stop shrinking."""
        gaps, backoffer, outage = self._answers.gaps(), self._backoffer(), self._outage()
        while gaps:
            with backoffer:
                advice = self._request(gaps)
            left = self._answers.gaps()
            if left and left != gaps:
                # Progress resets the retry budgets.
                backoffer, outage = self._backoffer(), self._outage()
            if left:
                longest = longest_wait(advice)
                waiting = outage if longest.backoff is STORAGE_ERROR else backoffer
                waiting.wait(longest.backoff, longest.cause, longest.at_least)
            gaps = left

    def _backoffer(self) -> Backoffer:
        return Backoffer(f"backup of {self._interval} by the stores", self._cluster.config.retry)

    def _outage(self) -> Backoffer:
        policy = patience_policy(self._options.storage.patience, STORES_WRITE_HINT)
        return Backoffer(f"backup of {self._interval} by the stores", policy)

    def _request(self, gaps: list[KeyRange]) -> list[RetryAdvice]:
        """Request all gaps from their leaders, once; returns advice for each failure."""
        round_ = _Round()
        for gap in gaps:
            for span in self._store_ranges(gap):
                self._send(span, round_)
        patience = LONG_FACTOR * self._cluster.config.request_timeout + self._job.rate_limit.seconds(UNANSWERED_BYTES)
        with contextlib.closing(read_all(round_.streams, patience)) as events:
            for numbered in events:
                self._context.report()  # raises if the task is cancelled
                if numbered is not None:
                    number, event = numbered
                    self._handle_event(round_.sent[number], event, round_)
        return round_.advice

    def _store_ranges(self, gap: KeyRange) -> list[StoreRange]:
        codec = self._converter.source
        regions = self._cluster.pd.scan_regions(codec.bound(gap.start), codec.bound(gap.end))
        return store_ranges(gap, regions, codec)

    def _send(self, span: StoreRange, round_: _Round) -> None:
        options, rewritten = self._options, self._job.rewrites_files
        folder = f"{self._folder}/{self._requests}"
        self._requests += 1
        message = request(
            span.range,
            self._cluster.cluster_id,
            self._stores_converter.target,
            INTERMEDIATE_COMPRESSION if rewritten else options.compression,
            0 if rewritten else options.compression_level,
            options.concurrency or 0,
            self._job.rate_limit.bytes_per_second,
        )
        place = options.storage.child(folder)
        _make_folder(place)
        message.storage_backend.CopyFrom(to_backend(place, send_credentials=options.send_credentials))
        message.cipher_info.CopyFrom(to_cipher_info(place))
        try:
            store = self._cluster.store(span.store_id)
            stream = self._stream(store, message)
        except ClusterUnreachable as error:
            round_.advice.append(RetryAdvice(retry.STORE_UNREACHABLE, error.message))
        except RequestRefused as error:  # the store has left the cluster
            round_.advice.append(RetryAdvice(retry.REGION_MISS, error.message))
        else:
            round_.streams.append(stream)
            round_.sent.append(_SentRequest(span, folder, str(store), message.storage_backend))

    def _stream(self, store: StoreClient, message: brpb_pb2.BackupRequest) -> AnswerStream:
        """The response stream; with a rate limit, a request is sent after the one before it has ended."""
        if not self._job.rate_limit:
            return store.backup(message)
        # Another task of a cancelled run may open the gate before this one cancels its streams.
        return GatedStream(self._job.rate_limit.gate(store.store.id), inherit(lambda: store.backup(message)))

    def _handle_event(self, sent: _SentRequest, event: brpb_pb2.BackupResponse | ClusterError, round_: _Round) -> None:
        """Handle a response, or the error that ended a stream. Raises errors that a retry does not fix."""
        if isinstance(event, brpb_pb2.BackupResponse):
            self._handle_response(sent, event, round_)
        elif isinstance(event, ClusterUnreachable):
            self._cluster.router.forget_store(sent.span.store_id)
            round_.advice.append(RetryAdvice(retry.STORE_UNREACHABLE, event.message))
        else:
            raise event

    def _handle_response(self, sent: _SentRequest, response: brpb_pb2.BackupResponse, round_: _Round) -> None:
        """Add an answer, or retry advice. Raises `RequestRefused` for an answer that does not match the request."""
        if response.HasField("error"):
            round_.advice.append(classify_error(response.error, sent.who, sent.backend))
            return
        answer = StoreAnswer(
            KeyRange(response.start_key, response.end_key),
            tuple(StoredSst(f"{sent.folder}/{file.name}", file) for file in response.files),
        )
        self._check_answer(answer, response, sent)
        replaced = self._answers.add(answer)
        self._report(answer, 1)
        for old in replaced:
            self._report(old, -1)

    def _check_answer(self, answer: StoreAnswer, response: brpb_pb2.BackupResponse, sent: _SentRequest) -> None:
        converter = self._stores_converter
        if not sent.span.range.contains(answer.range) or response.api_version != int(converter.target.api_version):
            raise RequestRefused(
                f"{sent.who} answered a request for {sent.span.range} as API {converter.target.api_version.label} "
                f"with {answer.range} as API version {response.api_version}"
            )
        for written in answer.files:
            covered = KeyRange(written.file.start_key, written.file.end_key)
            if written.file.cf != "default" or not converter.target_range(answer.range).contains(covered):
                raise RequestRefused(f"{sent.who} wrote {written.name} of {covered}, which is outside its request")

    def _record(self) -> LedgerEntry:
        job = self._job
        recorder = FileRecorder(self._converter, job.with_ttl, self._options.checksum, job.expiry_in_properties)
        files: list[FileEntry] = []
        source = Checksum()
        for written in self._answers.files():
            entry, sums = recorder.record(self._store, written)
            files.append(entry)
            source += sums
            self._context.report()
        counts = {entry.name: Checksum(0, entry.total_kvs, entry.total_bytes) for entry in files}
        return LedgerEntry(
            self._interval.start,
            self._interval.end,
            self._name,
            tuple(files),
            source,
            run=self._job.run,
            regions=self._regions(counts),
        )

    def _rewrite(self) -> LedgerEntry:
        """Rewrite the stores' files; the ledger entry of the new files."""
        files = DataFiles(self._store, self._interval, self._name, self._converter, self._options)
        self._rewritten = files
        total = RewriteTotals()
        for reached in rewrite_files(self._store, self._answers.files(), self._converter, files):
            total = reached
            self._context.report()
        return LedgerEntry(
            self._interval.start,
            self._interval.end,
            self._name,
            files.finish(),
            total.source,
            dropped_ttls=total.dropped_ttls,
            dropped_tombstones=total.dropped_tombstones,
            run=self._job.run,
            regions=self._regions_rewritten(),
        )

    def _regions(self, counts: Mapping[str, Checksum]) -> tuple[RegionPart, ...]:
        """Return the counts of each region, from its answer. ``counts`` are those of the stores' files, by name."""
        found = []
        for answer in self._answers.answers():
            sums = reduce(Checksum.merge, (counts[written.name] for written in answer.files), Checksum())
            if sums.total_kvs:
                found.append(part_of(self._converter.target_range(answer.range), sums))
        return tuple(found)

    def _regions_rewritten(self) -> tuple[RegionPart, ...]:
        converter = self._converter
        longer = len(converter.target.prefix) - len(converter.source.prefix)
        counts = {
            written.name: Checksum(
                0, written.file.total_kvs, written.file.total_bytes + longer * written.file.total_kvs
            )
            for written in self._answers.files()
        }
        return self._regions(counts)

    def _report(self, answer: StoreAnswer, sign: int) -> None:
        for written in answer.files:
            size, rows = sign * written.file.total_bytes, sign * written.file.total_kvs
            self._context.report(data_bytes=size, keys=rows)

    def _remove_files(self, keep: set[str]) -> None:
        """Remove this attempt's files, except ``keep``. Files that cannot be removed are unreferenced; the commit removes them."""
        try:
            for info in list(self._store.list(self._folder)):
                if info.name not in keep:
                    self._store.delete(info.name)
        except StorageError as error:
            log.warning("cannot remove the files below %s: %s", self._folder, error.message)
        _remove_empty_folders(self._options.storage.child(self._folder))


@dataclass(frozen=True, slots=True)
class _SentRequest:
    span: StoreRange
    folder: str
    """Folder of its files, relative to the backup."""
    who: str
    """The store, for messages."""
    backend: brpb_pb2.StorageBackend
    """The destination given to the store."""


@dataclass(slots=True)
class _Round:
    sent: list[_SentRequest] = field(default_factory=list)
    streams: list[AnswerStream] = field(default_factory=list)
    advice: list[RetryAdvice] = field(default_factory=list)


def _make_folder(place: StorageLocation) -> None:
    """Create a local folder: stores do not create it. Raises as a write to it."""
    if place.scheme != "local":
        return
    for last in (False, False, True):  # another attempt may be removing the parent folders
        try:
            Path(place.path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if last:
                raise to_storage_error(error, place.path, "written") from None


def _remove_empty_folders(place: StorageLocation) -> None:
    """Remove folders of requests that wrote no file, and parents that are empty then."""
    if place.scheme == "local":
        attempt = Path(place.path)
        for folder in (*attempt.glob("*"), attempt, attempt.parent):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()
