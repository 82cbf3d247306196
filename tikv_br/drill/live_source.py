"""Compares restored rows with the source: keys that the log has no change of since the restored time must be as restored.

Unlike a comparison with backup and log this also finds changes that the log never received. The source may be written to:
a key that differs must have a newer change in the log, if need be once the log has reached the time at which it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.timestamps import show_ts
from tikv_br.compare.report import Meter
from tikv_br.compare.sides import ClusterSide
from tikv_br.dataflow.merge import MergeSources
from tikv_br.drill.context import DrillContext
from tikv_br.errors import DifferencesFound, OutsideRestoreWindow, UsageError
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.patience import wait_until
from tikv_br.report.facts import Compared, counted

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.cluster import Cluster

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
        self._raw = self._cluster.raw(sources.log.description.keyspace_id)
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
        theirs = ClusterSide(self._raw, self._meter).pages(self._raw.codec.user_range(span))
        for found in compare_rows(ours, theirs, self._raw.now):
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
        """The keys without those of a range that have a change after the restored time in the files."""
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
