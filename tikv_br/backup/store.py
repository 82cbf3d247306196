"""The task of the store engine: has the stores that lead the interval's regions write SSTs, and records them in the ledger.

Also here: its requests, for raw (`StoreRequests`) and transactional data (`TxnRequests`), its ledger entry (`FinishedAnswers`), and what is
recorded of each file, or rewritten into another encoding or format (`FileRecorder`).

Regions that move, split or merge during the backup leave gaps between the answers; the gaps are requested again from the
current leaders. Every request writes into a separate folder, so that a late or repeated write never replaces the files of
another request. Runs in a thread of the driver or in a Spark Python worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec import Struct, field, structs

from tikv_br import retry
from tikv_br.backup.store_responses import (
    LOCKED,
    NO_ANSWER,
    SILENT_HINT,
    SILENT_SECONDS,
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
from tikv_br.backupset import backupmeta, layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import TAIL_SIZE, Expiry, FileEntry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.cancellation import inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import LONG_FACTOR, StoreClient
from tikv_br.dataflow.convert import CONVERTED_TS, Converter, expiry_of, join_expiry
from tikv_br.dataflow.plan import cut_at
from tikv_br.dataflow.write import BackupJob, DataFiles, PhaseSeconds, Snapshot, TaskResult, part_of, try_task
from tikv_br.errors import (
    BackupDamaged,
    ClusterError,
    ClusterUnreachable,
    LocksRemain,
    RequestRefused,
    RetryBudgetExhausted,
    StorageError,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.sst.compression import Compression
from tikv_br.retry import Backoffer, RetryPolicy
from tikv_br.storage.base import ObjectInfo, ObjectSource, ObjectStore
from tikv_br.storage.credentials import below, to_backend, to_cipher_info
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import patience_policy
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.sst.source import RandomAccess
    from tikv_br.formats.sst.table import Table

TAIL_READS = 4
"""Maximum number of reads of a file's tail, until two agree."""
_MIN_TS, _MAX_TS = "tikv.min_ts", "tikv.max_ts"
_MAX_EXPIRY = "tikv.max_expire_ts"
_EXPIRY_COLLECTOR = {ApiVersion.V1TTL: "tikv.range_index", ApiVersion.V2: "tikv.num_rows"}
"""Property that a store of each version writes into every file if it also records the latest expiry there."""


class Contents(NamedTuple):
    """Facts about a file that must be recorded but are not in the store's response."""

    min_ts: int
    max_ts: int
    expiry: Expiry
    source: Checksum
    """Checksum as the source cluster computes it; empty if not needed."""


class FileRecorder(Struct, frozen=True):
    """Computes the manifest entries of stores' files. Picklable."""

    converter: Converter
    with_ttl: bool
    """True if rows can have an expiry, which must then be recorded."""
    with_source_sums: bool
    """True if the source's checksum is needed; files in another encoding are read for it."""
    expiry_in_properties: bool
    """True if properties have the expiry of rows; else V2 files are read for it."""

    def record(self, store: ObjectStore, written: StoredSst) -> tuple[FileEntry, Checksum]:
        """The entry of a file, and its `Contents.source`.

        Raises `StorageObjectMissing` if the stores wrote to another place than this process reads, `BackupDamaged` if the file is
        not what its store reported.
        """
        file = written.file
        info = _stat(store, written)
        tail = read_tail(store, written.name, info.size, file.sha256)
        try:
            contents = self._contents(store, written)
        except FormatError as error:
            raise BackupDamaged(f"{written.name} is damaged: {error}") from None
        entry = FileEntry(
            name=written.name,
            size=info.size,
            start_key=file.start_key,
            end_key=file.end_key,
            crc64xor=file.crc64xor,
            total_kvs=file.total_kvs,
            total_bytes=file.total_bytes,
            sha256=file.sha256,
            tail_sha256=hashlib.sha256(tail).digest(),
            tail_size=len(tail),
            etag=info.etag,
            min_ts=contents.min_ts,
            max_ts=contents.max_ts,
            expiry=contents.expiry,
            cipher_iv=file.cipher_iv,
            cf="write" if file.cf == "write" else "default",
        )
        return entry, contents.source

    def _contents(self, store: ObjectStore, written: StoredSst) -> Contents:
        source, target = self.converter.source, self.converter.target
        reported = _store_sums(written)
        if source.mode is KeyMode.TXN:
            return Contents(0, 0, Expiry(), reported)
        same_form = source.prefix == target.prefix
        ts = CONVERTED_TS if target.is_v2 and not source.is_v2 else 0
        if not self.with_ttl and not source.is_v2 and (same_form or not self.with_source_sums):
            return Contents(ts, ts, Expiry(), reported if same_form else Checksum())
        from tikv_br.formats.sst.table import Table  # only files whose rows may expire are looked into

        stored = ObjectSource(store, written.name, written.file.cipher_iv)
        recorded = (
            _contents_by_properties(Table(stored), source.api_version)
            if source.api_version is target.api_version and (self.expiry_in_properties or not source.is_v2)
            else None
        )
        return recorded._replace(source=reported) if recorded is not None else self._count(stored, written)

    def _count(self, stored: RandomAccess, written: StoredSst) -> Contents:
        """Read the whole file, and check it against what its store reported."""
        from tikv_br.formats import columns  # imports Arrow and Numba, which most files do not need
        from tikv_br.formats.rows import from_storage
        from tikv_br.formats.sst.reader import SstReader

        reader = SstReader(stored)
        source, target = self.converter.source, self.converter.target
        counted, in_source_form, expiry, timestamps = Checksum(), Checksum(), Expiry(), [0, 0]
        for rows in reader.batches():
            records = from_storage(rows, target)
            keys, values, ts = records["key"], records["value"], columns.numbers(records["ts"])
            counted += checksum(keys, values, target.prefix)
            if self.with_source_sums:
                in_source_form += checksum(keys, values, source.prefix)
            expiry = join_expiry(expiry, expiry_of(keys, values, columns.numbers(records["expire_ts"]), target.prefix))
            timestamps = [min(timestamps[0] or int(ts.min()), int(ts.min())), max(timestamps[1], int(ts.max()))]
        if counted != _store_sums(written):
            raise BackupDamaged(f"{written.name} has {counted}, its store reported {_store_sums(written)}")
        return Contents(timestamps[0], timestamps[1], expiry, in_source_form)


def read_tail(store: ObjectStore, name: str, size: int, sha256: bytes) -> bytes:
    """The last bytes of a file of ``size`` bytes, as stored.

    Their hash is recorded, and a transfer error would make an intact file look damaged for good. So a read counts only if it is the
    whole file with the hash that its store reported (``sha256``), or if two reads agree. Raises `StorageUnreachable` if none do.
    """
    before = b""
    for _ in range(TAIL_READS):
        tail = store.get_range(name, max(size - TAIL_SIZE, 0), TAIL_SIZE)
        if hashlib.sha256(tail).digest() == sha256 or (tail == before and len(tail) == min(size, TAIL_SIZE)):
            return tail
        before = tail
    raise StorageUnreachable(f"the tail of {name} is different on each read", hint="Check the network and the storage.")


def _stat(store: ObjectStore, written: StoredSst) -> ObjectInfo:
    try:
        info = store.stat(written.name)
    except StorageObjectMissing as error:
        raise StorageObjectMissing(
            f"a store wrote {written.name}, but this machine cannot find it: {error.message}", hint=STORES_WRITE_HINT
        ) from None
    if info.size != written.file.size:
        raise BackupDamaged(f"{written.name} has {info.size} bytes, but its store wrote {written.file.size}")
    return info


def _store_sums(written: StoredSst) -> Checksum:
    """The store's sums of a file, in the encoding that it wrote."""
    return Checksum(written.file.crc64xor, written.file.total_kvs, written.file.total_bytes)


def _contents_by_properties(table: Table, api_version: ApiVersion) -> Contents | None:
    """The contents by the properties of the file; None if they do not suffice, because rows may expire.

    Not for converted files: the store writes their properties as if they had its own API version.
    """
    properties = table.properties
    if _EXPIRY_COLLECTOR[api_version] not in properties or _MAX_EXPIRY in properties:
        return None
    if api_version is not ApiVersion.V2:  # some versions of TiKV take the end of a key for a timestamp
        return Contents(0, 0, Expiry(), Checksum())
    oldest, newest = (int.from_bytes(properties.get(name, b""), "big") for name in (_MIN_TS, _MAX_TS))
    return Contents(oldest, newest, Expiry(), Checksum())


class RewriteTotals(Struct):
    """Totals of the rows written into new files."""

    source: Checksum = field(default_factory=Checksum)
    """Checksum as the source's servers compute it."""
    dropped_ttls: int = 0
    dropped_tombstones: int = 0


def rewrite_files(
    store: ObjectStore, written: Iterable[StoredSst], converter: Converter, files: DataFiles
) -> Iterator[RewriteTotals]:
    """Convert stores' files, in key order; yields the totals so far before the first and after each batch.

    Raises `BackupDamaged` for a file that is not what its store reported, and the errors of reading and writing.
    """
    total = RewriteTotals()
    yield total
    for file in written:
        before = total.source
        for records in _live_records(store, file, converter.source, total):
            converted = converter.convert(records)
            files.add(converted)
            total.source += converted.source
            total.dropped_ttls += converted.dropped_ttls
            yield total
        if before + _store_sums(file) != total.source:
            raise BackupDamaged(f"{file.name} differs from what its store reported, {_store_sums(file)}")


def _live_records(
    store: ObjectStore, file: StoredSst, codec: KeyCodec, total: RewriteTotals
) -> Iterator[pa.RecordBatch]:
    from tikv_br.backupset.rows import file_errors, read_rows
    from tikv_br.formats import columns
    from tikv_br.formats.rows import LiveFilter

    undeleted = LiveFilter()
    entry = structs.replace(backupmeta.decode_file(file.file), name=file.name)
    for batch in read_rows(store, entry, codec):
        total.dropped_tombstones += int(columns.flags(batch["deleted"]).sum())
        with file_errors(entry):
            alive = undeleted.apply(batch)
        if alive.num_rows:
            yield alive


class FinishedAnswers(Struct, frozen=True):
    """The answers of stores that cover an interval, to be recorded."""

    job: BackupJob
    interval: KeyRange
    attempt: str
    store: ObjectStore
    converter: Converter
    """Converter from the cluster's encoding to the backup's."""
    answers: ResponseSet
    report: Callable[[], None]
    """Called after each file, or batch of its rows."""

    def record(self) -> LedgerEntry:
        """The entry of the files as they are. Raises as `FileRecorder.record`."""
        job = self.job
        recorder = FileRecorder(self.converter, job.with_ttl, job.options.checksum, job.expiry_in_properties)
        files: list[FileEntry] = []
        source = Checksum()
        for written in self.answers.files():
            entry, sums = recorder.record(self.store, written)
            files.append(entry)
            source += sums
            self.report()
        counts = {entry.name: Checksum(0, entry.total_kvs, entry.total_bytes) for entry in files}
        return LedgerEntry(
            self.interval.start,
            self.interval.end,
            self.attempt,
            tuple(files),
            source,
            run=job.run,
            regions=self._regions(counts),
        )

    def rewrite(self, files: DataFiles) -> LedgerEntry:
        """Rewrite the stores' files; the entry of the new ``files``. Raises as `rewrite_files`."""
        total = RewriteTotals()
        for reached in rewrite_files(self.store, self.answers.files(), self.converter, files):
            total = reached
            self.report()
        longer = len(self.converter.target.prefix) - len(self.converter.source.prefix)
        counts = {
            written.name: Checksum(
                0, written.file.total_kvs, written.file.total_bytes + longer * written.file.total_kvs
            )
            for written in self.answers.files()
        }
        return LedgerEntry(
            self.interval.start,
            self.interval.end,
            self.attempt,
            files.finish(),
            total.source,
            dropped_ttls=total.dropped_ttls,
            dropped_tombstones=total.dropped_tombstones,
            run=self.job.run,
            regions=self._regions(counts),
        )

    def _regions(self, counts: Mapping[str, Checksum]) -> tuple[RegionPart, ...]:
        """Return the counts of each region, from its answer. ``counts`` has the counts of the stores' files, by name."""
        found = []
        for answer in self.answers.answers():
            sums = reduce(Checksum.merge, (counts[written.name] for written in answer.files), Checksum())
            if sums.total_kvs:
                found.append(part_of(self.converter.target_range(answer.range), sums))
        return tuple(found)


_COMPRESSION = {
    Compression.SNAPPY: brpb_pb2.SNAPPY,
    Compression.LZ4: brpb_pb2.LZ4,
    Compression.ZSTD: brpb_pb2.ZSTD,
}
INTERMEDIATE_COMPRESSION = Compression.LZ4
"""Compression of stores' files that are rewritten and then removed."""


class StoreRange(Struct, frozen=True):
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


class StoreRequests:
    """Requests of a task, which differ by the mode of keys. For one thread."""

    families: ClassVar[frozenset[str]]
    """Column families that an answer may have files of."""

    def __init__(self, job: BackupJob, cluster_id: int, target: KeyCodec) -> None:
        """``target`` is the encoding of the stores' files."""
        self._job = job
        self._cluster_id = cluster_id
        self._target = target

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """The request for a range, without its storage."""
        options, rewritten = self._job.options, self._job.rewrites_files
        return brpb_pb2.BackupRequest(
            cluster_id=self._cluster_id,
            start_key=span.start,
            end_key=span.end,
            dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(self._target.api_version),
            compression_type=_COMPRESSION[INTERMEDIATE_COMPRESSION if rewritten else options.compression],
            compression_level=0 if rewritten else options.compression_level,
            concurrency=options.concurrency or 0,
            rate_limit=self._job.rate_limit.bytes_per_second,
        )

    def clear_locks(self, span: KeyRange) -> None:
        """Clear what locked a range for the last request."""


class RawRequests(StoreRequests):
    """Requests for raw data, which has no locks."""

    families = frozenset({"default"})

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """As of `StoreRequests`."""
        message = super().message(span)
        message.is_raw_kv = True
        message.cf = "default"
        return message


class TxnRequests(StoreRequests):
    """Requests for what transactions have committed up to one timestamp."""

    families = frozenset({"default", "write"})

    def __init__(self, job: BackupJob, cluster: Cluster, target: KeyCodec, snapshot: Snapshot) -> None:
        super().__init__(job, cluster.cluster_id, target)
        self._locks = SnapshotLocks(cluster, snapshot.ts, snapshot.resolved_locks, patience=job.options.lock_patience)

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """As of `StoreRequests`."""
        message = super().message(span)
        message.end_version = self._locks.ts
        message.context.resolved_locks.extend(sorted(self._locks.resolved))
        return message

    def clear_locks(self, span: KeyRange) -> None:
        """Resolve them, or wait for their transactions. Raises as `SnapshotLocks.clear`."""
        self._locks.clear(span)


log = logging.getLogger(__name__)
UNANSWERED_BYTES = 1 << 30
"""Bytes that a store may write, for several regions at once, before its first response."""


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
        target = self._stores_converter.target
        self._requests: StoreRequests = (
            RawRequests(job, cluster.cluster_id, target)
            if job.snapshot is None
            else TxnRequests(job, cluster, target, job.snapshot)
        )
        self._answers = ResponseSet(interval)
        self._rewritten: DataFiles | None = None
        self._sent = 0

    def run(self) -> TaskResult:
        """Write the files and the ledger entry; after an error the files are removed."""
        began = time.perf_counter()
        try:
            with self._store.awaited():
                self._collect_answers()
            written = time.perf_counter()
            entry = self._make_entry()
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
        gaps, patience = self._answers.gaps(), self._patience()
        while gaps:
            with patience.cluster:
                advice = self._request(gaps)
            left = self._answers.gaps()
            if left and left != gaps:
                patience = self._patience()  # progress resets the retry budgets
            if any(each.backoff is LOCKED for each in advice):
                for gap in left:
                    self._requests.clear_locks(gap)
            if left:
                longest = longest_wait(advice)
                patience.of(longest).wait(longest.backoff, longest.cause, longest.at_least)
            gaps = left

    def _patience(self) -> _Patience:
        what = f"backup of {self._interval} by the stores"
        storage = patience_policy(self._options.storage.patience, STORES_WRITE_HINT)
        locks = RetryPolicy(self._options.lock_patience, error=LocksRemain)
        cluster = structs.replace(self._cluster.config.retry, error=_gave_up)
        return _Patience(Backoffer(what, cluster), Backoffer(what, storage), Backoffer(what, locks))

    def _request(self, gaps: list[KeyRange]) -> list[RetryAdvice]:
        """Request all gaps from their leaders, once; returns advice for each failure."""
        # Once for all requests: the keys of the cloud may have to be looked up, which takes 15 ms of a processor.
        backend = to_backend(self._options.storage, send_credentials=self._options.send_credentials)
        round_ = _Round()
        codec = self._converter.source
        for gap in gaps:
            regions = self._cluster.pd.scan_regions(codec.bound(gap.start), codec.bound(gap.end))
            for span in store_ranges(gap, regions, codec):
                self._send(span, regions, backend, round_)
        patience = LONG_FACTOR * self._cluster.config.request_timeout + self._job.rate_limit.seconds(UNANSWERED_BYTES)
        told_at = time.monotonic() + SILENT_SECONDS
        with contextlib.closing(read_all(round_.streams, patience)) as events:
            for numbered in events:
                self._context.report()  # raises if the task is cancelled
                if numbered is not None:
                    number, event = numbered
                    self._handle_event(round_.sent[number], event, round_)
                    told_at = math.inf
                elif time.monotonic() > told_at:
                    log.warning("no store has answered for %.0f s: %s", SILENT_SECONDS, SILENT_HINT)
                    told_at = math.inf
        return round_.advice

    def _send(
        self, span: StoreRange, regions: Sequence[Region], backend: brpb_pb2.StorageBackend, round_: _Round
    ) -> None:
        folder = f"{self._folder}/{self._sent}"
        self._sent += 1
        message = self._requests.message(span.range)
        place = self._options.storage.child(folder)
        _make_folder(place)
        message.storage_backend.CopyFrom(below(backend, place))
        message.cipher_info.CopyFrom(to_cipher_info(place))
        try:
            store = self._cluster.store(span.store_id)
            stream = self._stream(store, message, regions)
        except ClusterUnreachable as error:
            round_.advice.append(RetryAdvice(retry.STORE_UNREACHABLE, error.message))
        except RequestRefused as error:  # the store has left the cluster
            round_.advice.append(RetryAdvice(retry.REGION_MISS, error.message))
        else:
            round_.streams.append(stream)
            round_.sent.append(_SentRequest(span, folder, str(store), message.storage_backend))

    def _stream(self, store: StoreClient, message: brpb_pb2.BackupRequest, regions: Sequence[Region]) -> AnswerStream:
        """The response stream; with a rate limit, a request is sent after the one before it has ended."""
        if not self._job.rate_limit:
            return store.backup(message, regions)
        # The context of this task goes along: a request that waits at the gate must see that the run is cancelled.
        gate = self._job.rate_limit.gate(store.store.id)
        return GatedStream(gate, inherit(lambda: store.backup(message, regions)))

    def _handle_event(self, sent: _SentRequest, event: brpb_pb2.BackupResponse | ClusterError, round_: _Round) -> None:
        """Handle a response, or the error that ended a stream. Raises errors that a retry does not fix."""
        if isinstance(event, brpb_pb2.BackupResponse):
            self._handle_response(sent, event, round_)
        elif isinstance(event, ClusterUnreachable):
            self._cluster.router.forget_store(sent.span.store_id)
            cause = event.message if sent.who in event.message else f"{sent.who}: {event.message}"
            round_.advice.append(RetryAdvice(retry.STORE_UNREACHABLE, cause))
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
            if written.file.cf not in self._requests.families or not converter.target_range(answer.range).contains(
                covered
            ):
                raise RequestRefused(f"{sent.who} wrote {written.name} of {covered}, which is outside its request")

    def _make_entry(self) -> LedgerEntry:
        done = FinishedAnswers(
            self._job, self._interval, self._name, self._store, self._converter, self._answers, self._context.report
        )
        if not self._job.rewrites_files:
            return done.record()
        self._rewritten = DataFiles(self._store, self._interval, self._name, self._converter, self._options)
        return done.rewrite(self._rewritten)

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
        _remove_empty_folders(self._options.storage, self._folder)


class _SentRequest(Struct, frozen=True):
    span: StoreRange
    folder: str
    """Folder of its files, relative to the backup."""
    who: str
    """The store, for messages."""
    backend: brpb_pb2.StorageBackend
    """The destination given to the store."""


class _Patience(Struct, frozen=True):
    """Retry budgets of a task, by cause."""

    cluster: Backoffer
    storage: Backoffer
    locks: Backoffer

    def of(self, advice: RetryAdvice) -> Backoffer:
        return {STORAGE_ERROR: self.storage, LOCKED: self.locks}.get(advice.backoff, self.cluster)


class _Round(Struct):
    sent: list[_SentRequest] = field(default_factory=list)
    streams: list[AnswerStream] = field(default_factory=list)
    advice: list[RetryAdvice] = field(default_factory=list)


def _gave_up(message: str) -> RetryBudgetExhausted:
    hint = f"Check the store: {SILENT_HINT}. {STORES_WRITE_HINT}" if NO_ANSWER in message else None
    return RetryBudgetExhausted(message, hint=hint)


def _make_folder(place: StorageLocation) -> None:
    """Create a local folder: stores do not create it. Raises as a write to it."""
    if place.scheme == "local":
        LocalObjectStore(place).make_folder()


def _remove_empty_folders(storage: StorageLocation, folder: str) -> None:
    """Remove folders of requests that wrote no file, and parents that are empty then."""
    if storage.scheme == "local":
        store = LocalObjectStore(storage)
        with contextlib.suppress(StorageError):
            store.sweep(folder, deep=True)
            store.delete(f"{folder}/none")
