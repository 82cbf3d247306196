"""The scenario ``point-in-time``: chooses a time and the backup for it, restores, and compares the target with backup and log.

The comparison evaluates backup and log again, without the code of `restore_to_point`: it reads all files of the log that may
have rows of that time, sorts the versions of each key, and compares the newest with the row of the target.

Restored rows are also compared with the source: keys that the log has no change of since the restored time must be as restored.
Unlike the other comparison this also finds changes that the log never received. The source may be written to:
a key that differs must have a newer change in the log, if need be once the log has reached the time at which it was read.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.index import IndexEntry
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.timestamps import minus_seconds, physical_ms, show_ts
from tikv_br.compare.report import Meter
from tikv_br.compare.sides import ClusterSide
from tikv_br.dataflow.plan import plan_by_sizes
from tikv_br.dataflow.read import MergeSources, sizes_by_key
from tikv_br.drill import backups
from tikv_br.drill.context import DrillContext
from tikv_br.drill.options import PointChoice
from tikv_br.drill.recovery import ownership_reporter
from tikv_br.drill.report import ChosenPoint
from tikv_br.drill.targets import first_key
from tikv_br.errors import (
    BackupSetError,
    BackupUnsupported,
    DifferencesFound,
    LogDamaged,
    OutsideRestoreWindow,
    TikvBrError,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange, intersection, subtract
from tikv_br.point_in_time import PointOptions, restore_to_point
from tikv_br.progress_events import Notice
from tikv_br.report.facts import Compared, counted
from tikv_br.retry import wait_until
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.cluster import Cluster

MAX_SEED = 2**32 - 1


def select(context: DrillContext) -> None:
    """Choose a time, and the newest backup from which it can be restored.

    Raises `UsageError` for backups without timestamps and for a log of another cluster, `LogDamaged` if the log lacks changes
    since the backup, `OutsideRestoreWindow`, and as `BackupSet.open` and `LogArchive.open`.
    """
    choice = context.options.point
    if choice is None:
        raise ValueError("no log was requested")
    archive = LogArchive.open(open_store(choice.log.storage), choice.log.id)
    found = _usable_backups(context, choice, archive)
    newest, oldest = found[0].sources, found[-1].sources
    last = newest.window()[1]
    first = max(oldest.window()[0], minus_seconds(last, choice.seconds))
    seed = None
    if choice.ts is None:
        seed = secrets.randbelow(MAX_SEED + 1) if context.options.seed is None else context.options.seed
        ts = choose_ts(archive.inexact_windows(oldest.base.ranges), first, last, seed)
    else:
        ts = choice.ts or last
        first = oldest.window()[0]
    chosen = next((each for each in found if each.sources.window()[0] <= ts), found[-1])
    chosen.sources.check(ts)
    if choice.compare_source:
        source_of(context, chosen.sources.base.cluster_id)
    context.sources = chosen.sources
    context.point = ChosenPoint(chosen.sources.urls[-1], ts, seed, first, last)
    context.recorder(Notice(f"the drill {context.point}"))
    backups.select(context, chosen.place, chosen.sources.newest, chosen.entry)
    context.lost_ms, context.lost_clock = context.started_ms, backups.MACHINE_CLOCK


def choose_ts(inexact: Iterable[tuple[int, int]], first: int, last: int, seed: int) -> int:
    """A random timestamp from ``first`` to ``last`` that is not within one of the ``inexact`` windows, as ``last`` is not.

    The windows are as `LogArchive.inexact_windows` returns them.
    """
    periods: list[tuple[int, int]] = []
    start = first
    for before, after in inexact:
        if after <= start or before >= last:
            continue
        if start <= before:
            periods.append((start, before))
        start = after
    periods.append((start, last))
    chance = random.Random(seed)  # noqa: S311 - reproducible by its seed
    (period,) = chance.choices(periods, [end - begin + 1 for begin, end in periods])
    return chance.randint(*period)


def restore(context: DrillContext) -> None:
    """Restore to the chosen time as `tikv-br restore point` does; merged rows are first saved in the drill's folder."""
    choice, destination = context.options.point, context.destination
    if choice is None:
        raise ValueError("no log was requested")
    context.restore_start = context.recorder.now
    work = context.options.home.child(f"{context.folder}/merged")
    options = destination.restore_options(context.location, context.restore_state)
    restore_to_point(
        PointOptions(options, choice.log, context.point.restore_ts, work=work), ownership_reporter(context)
    )
    context.restored = context.recorder.now


@dataclass(frozen=True, slots=True)
class _Candidate:
    place: StorageLocation
    entry: IndexEntry
    sources: MergeSources


def _usable_backups(context: DrillContext, choice: PointChoice, archive: LogArchive) -> list[_Candidate]:
    """The newest backup that the log continues, and older ones until one is old enough for the time; the newest first."""
    if archive.damage:
        raise LogDamaged(f"the log at {archive.store.location.redacted()} is damaged: {archive.damage[0].problem}")
    found: list[_Candidate] = []
    refusal: TikvBrError | None = None
    for place, entry in _candidates(context):
        try:
            sources = _open(place, archive)
            first, last = sources.window()
            archive.check(sources.base.ranges, sources.newest.backup_ts, last)
            sources.check(last)
            _check_reaches_end(archive, sources)
        except (UsageError, OutsideRestoreWindow, BackupSetError) as error:
            if found:  # an older backup that the log does not continue, or that is damaged, does not matter
                break
            if not isinstance(error, UsageError | OutsideRestoreWindow):
                raise
            refusal = refusal or error
            continue
        each = _Candidate(place, entry or backups.entry_at(place, sources.newest), sources)
        if found and last < found[0].sources.window()[1]:
            break
        found.append(each)
        if first <= (minus_seconds(last, choice.seconds) if choice.ts is None else choice.ts or last):
            break
    if not found:
        raise refusal or UsageError("there is no backup")
    return found


def _candidates(context: DrillContext) -> Iterator[tuple[StorageLocation, IndexEntry | None]]:
    """The named backup, without its entry, or the folder's backups that replace each other, the newest first."""
    if context.options.existing is not None:
        yield context.options.existing, None
        return
    for entry in backups.newest_of_scope(context):
        yield context.options.backups.child(entry.path), entry


def _open(place: StorageLocation, archive: LogArchive) -> MergeSources:
    try:
        return MergeSources.open(place, None).with_log(archive)
    except BackupUnsupported as error:
        raise UsageError(f"--scenario point-in-time: {error.message}", hint=error.hint) from None


def _check_reaches_end(archive: LogArchive, sources: MergeSources) -> None:
    """Raise `LogDamaged` for a gap between the backup and the end of the log: the window would only be shorter."""
    end = max([archive.checkpoint_ts, *(segment.to_ts for segment in archive.segments)])
    with contextlib.suppress(UsageError):  # without a gap, a part of the keys may be ahead
        archive.check(sources.base.ranges, sources.newest.backup_ts, end)


MAX_PENDING_BYTES = 64 << 20
"""Maximum size of differing keys that are not in the log yet; with more, wait for the log at once."""
PATIENCE = 300.0
"""Seconds that the log may take to reach the time at which the source was read."""
POLL_SECONDS = 1.0
BATCH_ROWS = 1 << 12
STOPPED_HINT = "Check with `tikv-br log status` whether the log is written. --compare-source needs a log that is."
LOST_HINT = (
    "Changes that are in no feed, such as deleted ranges and ingested files, are not in the log either: take a new full backup "
    "after these. Otherwise the log lacks changes."
)


def source_of(context: DrillContext, cluster_id: int) -> Cluster:
    """The source. Raises `UsageError` if it is not the cluster that was backed up."""
    config = context.options.source
    if config is None:
        raise UsageError("--compare-source needs --pd, the cluster that was backed up")
    cluster = context.clusters.get(config)
    if cluster.cluster_id != cluster_id:
        raise UsageError(f"--compare-source: --pd is cluster {cluster.cluster_id}, the backup of cluster {cluster_id}")
    return cluster


class SourceComparison:
    """Takes the restored rows range by range; `finish` ends it. Both raise `DifferencesFound` and `OutsideRestoreWindow`."""

    def __init__(self, context: DrillContext, sources: MergeSources, ts: int) -> None:
        """``sources`` have a log; ``ts`` is the restored time."""
        if sources.log is None:
            raise ValueError("a comparison with the source needs a log")
        self._check_lease = context.check_lease
        self._cluster = source_of(context, sources.base.cluster_id)
        self._sources, self._ts = sources, ts
        self._log = self._read_log(sources.log)
        self._pending: list[pa.LargeBinaryArray] = []
        """Keys that differ and that the log has no change of yet."""
        self._meter = Meter()
        self._changed = 0
        """Keys that differ, with a newer change in the log."""

    def add(self, span: KeyRange, restored: pa.RecordBatch) -> None:
        """Compare the source with the rows of a range (RPC keys): of `SCHEMA`, one per key, by key."""
        import pyarrow as pa

        from tikv_br.compare.rows import compare_rows

        keys: list[pa.LargeBinaryArray] = []
        ours = (restored.slice(first, BATCH_ROWS) for first in range(0, restored.num_rows, BATCH_ROWS))
        raw = self._cluster.raw(codec_of(ApiVersion.V2, span).keyspace_id)
        theirs = ClusterSide(raw, self._meter).pages(raw.codec.user_range(span))
        for found in compare_rows(ours, theirs, raw.now):
            keys += [found.only_a["key"], found.value["key"], found.only_b]
        if sum(map(len, keys)):
            self._pending.append(self._without_changed(pa.concat_arrays(keys), self._changes(self._log), span))
        if sum(each.nbytes for each in self._pending) > MAX_PENDING_BYTES:
            self._settle()

    def finish(self, rows: int) -> Compared:
        """Wait until the log has the changes of all keys that differ; return the result for the restored rows."""
        self._settle()
        how = (
            f"every row read from the source: it is as restored, but for {counted(self._changed, 'key')} with a newer change in "
            "the log"
        )
        return Compared("source and restored rows", how, rows, self._meter.scanned_bytes)

    def _settle(self) -> None:
        import pyarrow as pa

        if not sum(map(len, self._pending)):
            return
        known = set(self._changes(self._log))
        self._log = self._wait_for_log(self._cluster.pd.tso())
        new = {name: file for name, file in self._changes(self._log).items() if name not in known}
        keys = pa.concat_arrays(self._pending)
        for span in self._sources.base.ranges:
            keys = self._without_changed(keys, new, span)
        self._pending = []
        if len(keys):
            raise DifferencesFound(
                f"the source differs from the restored rows in {counted(len(keys), 'key')}, the first is {keys[0].as_py().hex()}, "
                f"and the log has no change of that since {show_ts(self._ts)}",
                hint=LOST_HINT,
            )

    def _without_changed(
        self, keys: pa.LargeBinaryArray, files: Mapping[str, FileEntry], span: KeyRange
    ) -> pa.LargeBinaryArray:
        """The keys, without the keys of a range that have a change after the restored time in the files."""
        import pyarrow as pa
        import pyarrow.compute as pc

        total, after = len(keys), pa.scalar(self._ts, pa.uint64())
        for file in files.values():
            if not (part := intersection(file.key_range, span)).is_empty:
                for batch in self._log.rows(file, part):
                    changed = batch["key"].filter(pc.greater(batch["ts"], after))
                    keys = keys.filter(pc.invert(pc.is_in(keys, value_set=changed)))
        self._changed += total - len(keys)
        return keys

    def _changes(self, log: LogArchive) -> dict[str, FileEntry]:
        """The files with changes after the restored time, by name."""
        return {file.name: file for segment in log.segments for file in segment.files if file.max_ts > self._ts}

    def _wait_for_log(self, ts: int) -> LogArchive:
        """The log once it has all changes up to a timestamp. Raises `OutsideRestoreWindow` after `PATIENCE`."""

        def end() -> int:
            return self._log.end_ts(self._sources.newest.backup_ts, self._sources.base.ranges)

        def is_reached() -> bool:
            self._log = self._read_log(self._log)
            return end() >= ts

        def too_late() -> OutsideRestoreWindow:
            return OutsideRestoreWindow(
                f"the log did not reach {show_ts(ts)} within {PATIENCE:g} s, and ends at {show_ts(end())}",
                hint=STOPPED_HINT,
            )

        wait_until(is_reached, PATIENCE, too_late, poll=POLL_SECONDS, check=self._check_lease)
        return self._log

    @staticmethod
    def _read_log(log: LogArchive) -> LogArchive:
        return LogArchive.open(log.store, log.description.log_id)


INTERVAL_BYTES = 64 << 20
"""Approximate size of backup and log that is compared at once."""
BUFFER_BYTES = 64 << 20
"""Rows that are read before those that are not the newest of their key are dropped."""
RPO_METHOD = (
    "From the last time that backup and log can restore exactly until the start of the drill, by this machine's clock. It does "
    "not matter whether the source was written to in that time, nor which time the drill restored."
)
RTO_METHOD = (
    "By this machine's clock, from the start of the merge of backup and log until the target had been compared with the merged "
    "rows. The time to find people, machines and decisions is not included, nor the second comparison, with backup and log."
)
log = logging.getLogger(__name__)


def verify(context: DrillContext) -> None:
    """Compare every row of the target with what backup and log say, and with the source if requested. Raises `DifferencesFound`."""
    sources, destination, ts = context.sources, context.destination, context.point.restore_ts
    choice, cluster = context.options.point, context.clusters.get(destination.cluster)
    source = SourceComparison(context, sources, ts) if choice is not None and choice.compare_source else None
    files = log_files(sources, ts)
    sizes = sizes_by_key(sources, files)
    wanted = destination.restore_ranges(context.backup)
    meter, rows, expiring, sums = Meter(), 0, 0, Checksum()
    for whole in wanted:
        codec = codec_of(ApiVersion.V2, whole.span)
        raw = cluster.raw(codec.keyspace_id if destination.keyspace is None else destination.keyspace)
        keys = codec.user_range(whole.span)
        sums += raw.checksum(keys)
        for interval in plan_by_sizes(whole.span, sizes, INTERVAL_BYTES):
            context.check_lease()
            span = interval.span
            expected = rows_at(_all_rows(sources, files, span), ts)
            expiring += _compare(context, raw, meter, codec.user_range(span), expected)
            rows += expected.num_rows
            if source is not None:
                source.add(span, expected)
    if (extra := first_key(cluster, subtract(destination.ranges, [each.target for each in wanted]))) is not None:
        raise DifferencesFound(f"the target has the key {extra.hex()}, which is outside the backup's ranges")
    expired = f" {expiring:,} rows were about to expire and may be absent." if expiring else ""
    how = (
        f"every row read from the target, key and value, against the newest version up to {show_ts(ts, age=False)} in "
        f"{counted(len(sources.backups), 'backup')} and {counted(len(files), 'file')} of the log, without the merge of the "
        f"restore.{expired}"
    )
    context.compared.append(Compared("target, and backup and log", how, rows, meter.scanned_bytes))
    if source is not None:
        context.compared.append(source.finish(rows))
    if not rows:
        log.warning("backup and log of drill %s have no key at that time, so its restore proves little", context.id)
    _measure(context, sums.total_kvs)


def _measure(context: DrillContext, keys: int) -> None:
    context.measured = replace(
        context.measured,
        rpo=max(context.lost_ms - physical_ms(context.point.last_ts), 0) / 1000,
        rpo_method=RPO_METHOD,
        rto=round(context.restored - context.restore_start, 3),
        rto_method=RTO_METHOD,
        keys=keys,
    )


def log_files(sources: MergeSources, ts: int) -> tuple[FileEntry, ...]:
    """All files of the log that may have changes after the newest backup, up to a timestamp."""
    segments = () if sources.log is None else sources.log.segments
    after = sources.newest.backup_ts
    found = {file.name: file for segment in segments for file in segment.files}
    return tuple(file for file in found.values() if file.min_ts <= ts and file.max_ts > after)


def rows_at(batches: Iterable[pa.RecordBatch], ts: int) -> pa.RecordBatch:
    """The rows that a reader saw at a timestamp, by key. ``batches``: versions of keys, in any order, of `SCHEMA`.

    Memory: the newest version of each key, and `BUFFER_BYTES`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from tikv_br.formats.columns import SCHEMA

    buffer: list[pa.RecordBatch] = []
    size = 0

    def newest() -> pa.Table:
        table = pa.Table.from_batches(buffer, SCHEMA).sort_by([("key", "ascending"), ("ts", "descending")])
        if table.num_rows < 2:
            return table
        keys = table["key"].combine_chunks()
        return table.filter(pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])]))

    for batch in batches:
        buffer.append(batch.filter(pc.less_equal(batch["ts"], pa.scalar(ts, pa.uint64()))))
        size += batch.nbytes
        if size > BUFFER_BYTES:
            buffer, size = newest().to_batches(), 0
    table = newest()
    expire_ts, now = table["expire_ts"], pa.scalar(physical_ms(ts) // 1000, pa.uint64())
    lives = pc.or_(pc.equal(expire_ts, pa.scalar(0, pa.uint64())), pc.greater(expire_ts, now))
    seen = table.filter(pc.and_(lives, pc.invert(table["deleted"]))).combine_chunks()
    return pa.RecordBatch.from_pylist([], SCHEMA) if not seen.num_rows else seen.to_batches()[0]


def _all_rows(sources: MergeSources, files: Iterable[FileEntry], span: KeyRange) -> Iterator[pa.RecordBatch]:
    """Yield every version of a range's keys in the backups, and in the log since the newest backup."""
    import pyarrow as pa
    import pyarrow.compute as pc

    codec = codec_of(ApiVersion.V2, span)
    for backup in sources.backups:
        for file in backup.files:
            if not (part := intersection(file.key_range, span)).is_empty:
                yield from read_rows(backup.store, file, codec, part)
    if sources.log is None:
        return
    after = pa.scalar(sources.newest.backup_ts, pa.uint64())
    for file in files:
        if not (part := intersection(file.key_range, span)).is_empty:
            for batch in sources.log.rows(file, part):
                yield batch.filter(pc.greater(batch["ts"], after))


def _compare(context: DrillContext, raw: RawClient, meter: Meter, span: KeyRange, expected: pa.RecordBatch) -> int:
    """Compare a range of the target with the rows that it must have; returns how many of these are about to expire."""
    from tikv_br.compare.rows import compare_rows

    expiring = 0
    step = 1 << 12
    parts = (expected.slice(first, step) for first in range(0, expected.num_rows, step))
    for found in compare_rows(parts, ClusterSide(raw, meter).pages(span), raw.now):
        expiring += found.expiring
        kinds = (
            ("is absent", found.only_a["key"]),
            ("has another value", found.value["key"]),
            ("is extra", found.only_b),
        )
        for problem, keys in kinds:
            if len(keys):
                raise DifferencesFound(
                    f"the target does not have the rows of {show_ts(context.point.restore_ts)}: key {keys[0].as_py().hex()} "
                    f"{problem}, by backup and log",
                    hint="Repeat the drill with --until, and please report it: either somebody writes to the target, or "
                    "this is a defect of tikv-br.",
                )
    return expiring
