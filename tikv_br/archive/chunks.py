"""Chooses the segments that a compaction rewrites, as chunks of adjacent ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import Segment
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import LogDamaged, UsageError
from tikv_br.formats.keys.ranges import KeyRange

TASK_BYTES = 256 << 20
"""Keys and values that a task sorts at once, and about the size of a new segment. A task needs about four times that in memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Adjacent segments of one span that become one; the work of one task."""

    segments: tuple[Segment, ...]
    """Segments by `from_ts`, without a gap."""

    @property
    def span(self) -> KeyRange:
        """Span of each segment."""
        return self.segments[0].span

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files of all segments, the oldest rows first."""
        found = {file.name: file for segment in self.segments for file in segment.files}
        return tuple(sorted(found.values(), key=lambda file: (file.min_ts, file.name)))

    def segment(self, files: tuple[FileEntry, ...]) -> Segment:
        """The segment that replaces these, with files that have all of their rows."""
        return Segment(
            log_id=self.segments[0].log_id,
            start=self.span.start,
            end=self.span.end,
            from_ts=min(each.from_ts for each in self.segments),
            to_ts=max(each.to_ts for each in self.segments),
            files=files,
            written_ms=time.time_ns() // 1_000_000,
            token=secrets.token_hex(4),
            inexact=tuple(dict.fromkeys(period for each in self.segments for period in each.inexact)),
            missed=tuple(dict.fromkeys(ingest for each in self.segments for ingest in each.missed)),
            replaces=tuple(each.name for each in self.segments),
        )

    def __str__(self) -> str:
        return f"{self.span} from {show_ts(self.segments[0].from_ts)}"


def plan_chunks(archive: LogArchive, until_ts: int = 0, task_bytes: int = TASK_BYTES) -> list[Chunk]:
    """Group the segments that are worth rewriting.

    Large ones that a compaction wrote are left alone: so each row is rewritten few times, and a truncation finds segments that end
    before its time. Raises `LogDamaged` for a log with gaps or damage, `UsageError` for a ts outside of the log.
    """
    log_id, place = archive.description.log_id, archive.store.location.redacted()
    if archive.damage:
        raise LogDamaged(f"the log {log_id} at {place} is damaged: {archive.damage[0].problem}")
    if found := archive.gaps():
        raise LogDamaged(f"the log {log_id} at {place} has no changes of {found[0]}")
    last = max((segment.to_ts for segment in archive.segments), default=archive.start_ts)
    if until_ts and not archive.start_ts <= until_ts <= last:
        raise UsageError(
            f"{show_ts(until_ts)} is outside the log {log_id}, which has changes from {show_ts(archive.start_ts)} to {show_ts(last)}",
            hint="Pass a time in the log, or leave out --until.",
        )
    spans: dict[KeyRange, list[Segment]] = {}
    for segment in archive.segments:
        if not until_ts or segment.to_ts <= until_ts:
            spans.setdefault(segment.span, []).append(segment)
    return [
        Chunk(tuple(group))
        for each in spans.values()
        for group in _groups(each, task_bytes)
        if _is_worth_rewriting(group)
    ]


def _groups(segments: Sequence[Segment], task_bytes: int) -> Iterator[list[Segment]]:
    """Runs without a gap of about `task_bytes`, from segments of one span by `from_ts`."""
    group: list[Segment] = []
    reached = filled = 0
    for segment in segments:
        size = sum(file.total_bytes for file in segment.files)
        is_done = bool(segment.replaces) and size >= task_bytes // 2
        if group and (is_done or segment.from_ts > reached or filled + size > task_bytes):
            yield group
            group, filled = [], 0
        if is_done:
            continue
        reached = max(reached, segment.to_ts) if group else segment.to_ts
        group.append(segment)
        filled += size
    if group:
        yield group


def _is_worth_rewriting(group: Sequence[Segment]) -> bool:
    """Return whether rewriting yields fewer objects, or partitions files that are not partitioned."""
    return len(group) > 1 or (not group[0].replaces and len(group[0].files) > 1)
