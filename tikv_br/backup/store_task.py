"""The store engine's task: have the stores that lead the interval's regions write its SSTs, and record it in the ledger.

Regions that move, split or merge while stores write leave gaps between the answers; those are asked for again, of whoever
leads them by then. Every request writes into a folder of its own, so that a store that is late, or repeats itself, never
replaces what another request has already answered for. Runs in a thread of the driver or a Spark Python worker.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from formats.checksum import Checksum
from formats.sst.compression import Compression
from tikv_br.backup.convert import Conversion, Converter
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.gate import GatedStream, gate_of
from tikv_br.backup.range_tree import Answer, RangeTree, StoredSst
from tikv_br.backup.region_tally import part_of
from tikv_br.backup.rewrite import Rewriter, Rewritten
from tikv_br.backup.store_errors import Trouble, trouble_of, worst
from tikv_br.backup.store_files import FileRecorder
from tikv_br.backup.store_requests import Span, request, spans
from tikv_br.backup.streams import AnswerStream, read_all
from tikv_br.backup.task import PhaseSeconds, Task, TaskResult, try_task
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import LedgerEntry, write_entry
from tikv_br.backupset.regions import RegionPart
from tikv_br.cluster import retry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.retry import Backoffer
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.store import LONG_FACTOR, StoreClient
from tikv_br.errors import ClusterError, ClusterUnreachable, RequestRefused, StorageError, StorageReadOnly
from tikv_br.spark.task import TaskContext
from tikv_br.storage.backend import to_backend, to_cipher_info
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)
UNANSWERED_BYTES = 1 << 30
"""What a store may be writing, of several regions at once, before it answers for the first."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """What all tasks of a run share. Pickles."""

    run: str
    """See `LedgerEntry`."""
    cluster: ClusterConfig
    storage: StorageLocation
    conversion: Conversion
    """That the stores do."""
    with_ttl: bool
    """See `FileRecorder`."""
    with_source_sums: bool
    compression: Compression
    compression_level: int
    concurrency: int
    """Passed on to the stores, which may have their own mind; 0 = theirs."""
    send_credentials: bool
    rate_limit: int
    """Bytes a second that each store may write for this process; 0 = no limit."""
    rewriter: Rewriter | None = None
    """What makes the backup's files of those that stores write; None = they are the same."""


def run_store_task(job: StoreJob, task: Task, context: TaskContext) -> TaskResult:
    """Do one interval, anew where an error may pass. Raises the `TikvBrError` of the last attempt."""
    return try_task(lambda: _Attempt(job, task, context, shared_cluster(job.cluster), open_store(job.storage)).run())


class _Attempt:
    """One try at a task."""

    def __init__(self, job: StoreJob, task: Task, context: TaskContext, cluster: Cluster, store: ObjectStore) -> None:
        self._job = job
        self._task = task
        self._context = context
        self._cluster = cluster
        self._store = store
        self._name = secrets.token_hex(8)
        self._converter = job.conversion.of(task.interval)
        self._folder = layout.store_folder(task.interval, self._name)
        self._answers = RangeTree(task.interval)
        self._rewritten: DataFiles | None = None
        self._requests = 0
        self._reported = Checksum()

    def run(self) -> TaskResult:
        """Have the files and the ledger entry written, or nothing."""
        began = time.perf_counter()
        try:
            self._collect()
            written = time.perf_counter()
            entry = self._record() if self._job.rewriter is None else self._rewrite(self._job.rewriter)
            self._sweep(keep={file.name for file in entry.files})
            write_entry(self._store, entry)
        except BaseException:
            if self._rewritten is not None:
                self._rewritten.abandon()
            self._sweep(keep=set())
            self._context.report(data_bytes=-self._reported.total_bytes, keys=-self._reported.total_kvs)
            raise
        seconds = PhaseSeconds(store=written - began, inspect=time.perf_counter() - written)
        return TaskResult(entry, seconds)

    def _collect(self) -> None:
        """Ask until the answers cover the interval. Raises `RetryBudgetExhausted` when the gaps stay as they are."""
        gaps, backoffer = self._answers.gaps(), self._backoffer()
        while gaps:
            troubles = self._ask(gaps)
            left = self._answers.gaps()
            if left and left != gaps:
                backoffer = self._backoffer()  # it goes on: the budget is for standing still
            if left:
                trouble = worst(troubles)
                backoffer.wait(trouble.backoff, trouble.cause, trouble.at_least)
            gaps = left

    def _backoffer(self) -> Backoffer:
        return self._cluster.router.backoffer(f"backup of {self._task} by the stores")

    def _ask(self, gaps: list[KeyRange]) -> list[Trouble]:
        """Ask all leaders for all gaps, once; returns what went wrong."""
        round_ = _Round()
        for gap in gaps:
            for span in self._spans(gap):
                self._send(span, round_)
        patience = LONG_FACTOR * self._cluster.config.request_timeout
        if self._job.rate_limit:
            patience += UNANSWERED_BYTES / self._job.rate_limit
        with contextlib.closing(read_all(round_.streams, patience)) as events:
            for event in events:
                self._context.report()  # raises when nobody waits any more
                if event is not None:
                    number, said = event
                    self._hear(round_.sent[number], said, round_)
        return round_.troubles

    def _spans(self, gap: KeyRange) -> list[Span]:
        """Who leads what of a gap, by PD's newest word."""
        codec = self._converter.source
        regions = self._cluster.pd.scan_regions(codec.bound(gap.start), codec.bound(gap.end))
        return spans(gap, regions, codec)

    def _send(self, span: Span, round_: _Round) -> None:
        job, folder = self._job, f"{self._folder}/{self._requests}"
        self._requests += 1
        message = request(
            span.range,
            self._cluster.cluster_id,
            self._converter.target,
            job.compression,
            job.compression_level,
            job.concurrency,
            job.rate_limit,
        )
        place = job.storage.child(folder)
        _make_folder(place)
        message.storage_backend.CopyFrom(to_backend(place, send_credentials=job.send_credentials))
        message.cipher_info.CopyFrom(to_cipher_info(place))
        try:
            store = self._cluster.store(span.store_id)
            stream = self._stream(store, message)
        except ClusterUnreachable as error:
            round_.troubles.append(Trouble(retry.STORE_UNREACHABLE, error.message))
        except RequestRefused as error:  # a store that has left the cluster
            round_.troubles.append(Trouble(retry.REGION_MISS, error.message))
        else:
            round_.streams.append(stream)
            round_.sent.append(_Sent(span, folder, str(store)))

    def _stream(self, store: StoreClient, message: brpb_pb2.BackupRequest) -> AnswerStream:
        """The answers to a request, which with a rate limit is sent when the one before it has ended."""
        if not self._job.rate_limit:
            return store.backup(message)
        return GatedStream(gate_of(self._job.cluster, store.store.id), lambda: store.backup(message))

    def _hear(self, sent: _Sent, said: brpb_pb2.BackupResponse | ClusterError, round_: _Round) -> None:
        """Book what came of a request: an answer, or how its stream ended. Raises what no retry cures."""
        if isinstance(said, brpb_pb2.BackupResponse):
            self._take(sent, said, round_)
        elif isinstance(said, ClusterUnreachable):
            self._cluster.router.forget_store(sent.span.store_id)
            round_.troubles.append(Trouble(retry.STORE_UNREACHABLE, said.message))
        else:
            raise said

    def _take(self, sent: _Sent, response: brpb_pb2.BackupResponse, round_: _Round) -> None:
        """Book an answer, or what went wrong. Raises `RequestRefused` for an answer to another question."""
        if response.HasField("error"):
            round_.troubles.append(trouble_of(response.error, sent.who))
            return
        answer = Answer(
            KeyRange(response.start_key, response.end_key),
            tuple(StoredSst(f"{sent.folder}/{file.name}", file) for file in response.files),
        )
        self._check_answer(answer, response, sent)
        replaced = self._answers.add(answer)
        self._report(answer, 1)
        for old in replaced:
            self._report(old, -1)

    def _check_answer(self, answer: Answer, response: brpb_pb2.BackupResponse, sent: _Sent) -> None:
        converter = self._converter
        if not sent.span.range.contains(answer.range) or response.api_version != int(converter.target.api_version):
            raise RequestRefused(
                f"{sent.who} was asked for {sent.span.range} as API {converter.target.api_version.label}, and answers "
                f"with {answer.range} as version {response.api_version}"
            )
        for written in answer.files:
            covered = KeyRange(written.file.start_key, written.file.end_key)
            if written.file.cf != "default" or not converter.target_range(answer.range).contains(covered):
                raise RequestRefused(
                    f"{sent.who} wrote {written.name} of {covered}, which is not what it was asked for"
                )

    def _record(self) -> LedgerEntry:
        """The stores' files as they are."""
        recorder = FileRecorder(self._converter, self._job.with_ttl, self._job.with_source_sums)
        files: list[FileEntry] = []
        source = Checksum()
        for written in self._answers.files():
            entry, sums = recorder.record(self._store, written)
            files.append(entry)
            source += sums
            self._context.report()
        counts = {entry.name: Checksum(0, entry.total_kvs, entry.total_bytes) for entry in files}
        return LedgerEntry(
            self._task.start,
            self._task.end,
            self._name,
            tuple(files),
            source,
            run=self._job.run,
            regions=self._regions(self._converter, counts),
        )

    def _rewrite(self, rewriter: Rewriter) -> LedgerEntry:
        """New files of the rows in the stores' files."""
        files = self._rewritten = rewriter.files(self._store, self._task.interval, self._name)
        total = Rewritten()
        for reached in rewriter.rewrite(self._store, self._task.interval, self._answers.files(), files):
            total = reached
            self._context.report()
        return LedgerEntry(
            self._task.start,
            self._task.end,
            self._name,
            files.finish(),
            total.source,
            dropped_ttls=total.dropped_ttls,
            dropped_tombstones=total.dropped_tombstones,
            run=self._job.run,
            regions=self._regions_rewritten(rewriter.conversion.of(self._task.interval)),
        )

    def _regions(self, converter: Converter, counts: Mapping[str, Checksum]) -> tuple[RegionPart, ...]:
        """What each region held: a store answers for each. ``counts`` are of the stores' files, by name."""
        found = []
        for answer in self._answers.answers():
            sums = reduce(Checksum.merge, (counts[written.name] for written in answer.files), Checksum())
            if sums.total_kvs:
                found.append(part_of(converter.target_range(answer.range), sums))
        return tuple(found)

    def _regions_rewritten(self, converter: Converter) -> tuple[RegionPart, ...]:
        """The same in the form of the files that were made of the stores' own."""
        longer = len(converter.target.prefix) - len(converter.source.prefix)
        counts = {
            written.name: Checksum(
                0, written.file.total_kvs, written.file.total_bytes + longer * written.file.total_kvs
            )
            for written in self._answers.files()
        }
        return self._regions(converter, counts)

    def _report(self, answer: Answer, sign: int) -> None:
        for written in answer.files:
            size, rows = sign * written.file.total_bytes, sign * written.file.total_kvs
            self._reported += Checksum(0, rows, size)
            self._context.report(data_bytes=size, keys=rows)

    def _sweep(self, keep: set[str]) -> None:
        """Remove what this attempt's stores wrote and nobody needs. What stays is unreferenced, and goes at the commit."""
        try:
            for info in list(self._store.list(self._folder)):
                if info.name not in keep:
                    self._store.delete(info.name)
        except StorageError as error:
            log.warning("files below %s stay in the storage: %s", self._folder, error.message)
        _remove_empty_folders(self._job.storage.child(self._folder))


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request under way."""

    span: Span
    folder: str
    """Where its files go, below the backup."""
    who: str
    """The store, for people."""


@dataclass(slots=True)
class _Round:
    """Requests that are under way together."""

    sent: list[_Sent] = field(default_factory=list)
    streams: list[AnswerStream] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)


def _make_folder(place: StorageLocation) -> None:
    """Stores write into a folder that exists, and make none. Raises `StorageReadOnly`."""
    if place.scheme != "local":
        return
    for last in (False, False, True):  # another attempt may be removing the folders above just now
        try:
            Path(place.path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if last:
                raise StorageReadOnly(f"{place} cannot be made: {error.strerror}") from None


def _remove_empty_folders(place: StorageLocation) -> None:
    """Those of requests that no file came of, and what is empty then."""
    if place.scheme == "local":
        attempt = Path(place.path)
        for folder in (*attempt.glob("*"), attempt, attempt.parent):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()
