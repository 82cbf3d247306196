"""Up to which time the segments of a log cover its keys, and their gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tikv_br.archive.records import Segment
from tikv_br.cluster.timestamps import show_ts
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection


@dataclass(frozen=True, slots=True)
class LogGap:
    """Changes that no segment has: keys of `span` with from_ts < ts <= to_ts."""

    span: KeyRange
    from_ts: int
    to_ts: int
    cause: str = ""
    """The ingest whose rows no change feed delivers; empty = a segment is missing."""

    def __str__(self) -> str:
        because = f": {self.cause} ingested rows with older timestamps" if self.cause else ""
        period = f"from {show_ts(self.from_ts, age=False)} to {show_ts(self.to_ts, age=False)}"
        return f"{self.span} {period}{because}"


@dataclass(slots=True)
class Coverage:
    """Time up to which segments cover each key without a gap."""

    spans: Sequence[KeyRange]
    after_ts: int
    gaps: list[LogGap] = field(default_factory=list)
    _pieces: list[tuple[KeyRange, int]] = field(default_factory=list)
    """Adjacent spans, and the ts that each has reached."""

    def __post_init__(self) -> None:
        self._pieces = [(span, self.after_ts) for span in self.spans if not span.is_empty]

    def add(self, segments: Iterable[Segment]) -> Coverage:
        """Add segments by ascending `from_ts`; returns itself."""
        for segment in segments:
            if segment.to_ts > self.after_ts:
                self._add(segment)
            self.gaps += [
                LogGap(here, max(missed.from_ts, self.after_ts), missed.to_ts, missed.cause)
                for missed in segment.missed
                for span in self.spans
                if missed.to_ts > self.after_ts and not (here := intersection(span, missed.span)).is_empty
            ]
        return self

    @property
    def end_ts(self) -> int:
        """Lowest ts up to which every key is covered."""
        return min([gap.from_ts for gap in self.gaps] + [reached for _, reached in self._pieces], default=self.after_ts)

    def gaps_until(self, ts: int) -> list[LogGap]:
        """The gaps up to a ts, by time."""
        inside = [replace(gap, to_ts=min(gap.to_ts, ts)) for gap in self.gaps if gap.from_ts < ts]
        tail = [LogGap(span, reached, ts) for span, reached in self._pieces if reached < ts]
        return sorted(inside + tail, key=lambda gap: (gap.from_ts, gap.to_ts, gap.span))

    def _add(self, segment: Segment) -> None:
        pieces: list[tuple[KeyRange, int]] = []
        for span, reached in self._pieces:
            here = intersection(span, segment.span)
            if here.is_empty or segment.to_ts <= reached:
                pieces.append((span, reached))
                continue
            if segment.from_ts > reached:
                self.gaps.append(LogGap(here, reached, segment.from_ts))
            rest = gaps(span, [here])
            pieces += sorted([(here, segment.to_ts), *((each, reached) for each in rest)])
        self._pieces = []
        for span, reached in pieces:
            if self._pieces and self._pieces[-1][1] == reached and self._pieces[-1][0].end == span.start:
                span = KeyRange(self._pieces.pop()[0].start, span.end)  # noqa: PLW2901 - merged with the one before
            self._pieces.append((span, reached))
