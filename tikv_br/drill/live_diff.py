"""Compares a target with a source that is written to all the while, and followed by the target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.shared import shared_cluster
from tikv_br.diff.options import ClusterChoice, DiffOptions
from tikv_br.diff.run import DiffResult, diff
from tikv_br.diff.values import Span
from tikv_br.errors import DifferencesFound
from tikv_br.progress_events import Reporter

LOOKED_AT = 2000
"""So many keys are looked at one by one; where more differ, ranges are compared again."""
ROUNDS = 5
TRIES = 3

CatchUp = Callable[[Callable[[], None]], None]
"""Returns when B has all that A had when it was called; calls what it is given again and again meanwhile."""


@dataclass(frozen=True, slots=True)
class LiveDiff:
    """What a comparison came to that found no difference."""

    rows: int
    bytes: int
    moving: int
    """Keys that were written at the source between any two looks: nothing is said of them."""


def compare_live(options: DiffOptions, catch_up: CatchUp, reporter: Reporter) -> LiveDiff:
    """Compare A with B, which follows it.

    Raises `DifferencesFound` for a key that B has otherwise than A, though A has not changed it meanwhile.
    """
    found = [diff(replace(options, keys=LOOKED_AT), reporter)]
    rows, size = found[0].summary.rows, found[0].summary.bytes
    for _round in range(ROUNDS):
        remaining = sum(each.summary.remaining for each in found)
        if remaining == sum(len(each.keys) for each in found):
            keys = [difference.key for each in found for difference in each.keys]
            return LiveDiff(rows, size, _follow_keys(options, keys, catch_up))
        catch_up(_nothing)
        found = [_again(options, span, reporter) for span in _spans(found)]
    raise DifferencesFound(
        f"{remaining} keys of the target differ from the source's, in each of {ROUNDS} comparisons",
        hint="If so many keys are written at any time, stop the writes for the cut-over; else compare by `tikv-br diff`.",
    )


def _again(options: DiffOptions, span: Span, reporter: Reporter) -> DiffResult:
    return diff(replace(options, keys=LOOKED_AT, start=span.start, end=span.end), reporter)


def _spans(found: Sequence[DiffResult]) -> list[Span]:
    """The ranges that differ, neighbours put together."""
    spans: list[Span] = []
    for span in sorted(each.span for result in found for each in result.ranges):
        if spans and spans[-1].end == span.start:
            spans[-1] = Span(spans[-1].start, span.end)
        else:
            spans.append(span)
    return spans


def _follow_keys(options: DiffOptions, keys: Sequence[bytes], catch_up: CatchUp) -> int:
    """See that B has of each key what A has had; how many changed too fast to tell."""
    a, b = (_raw(side) for side in (options.a, options.b) if isinstance(side, ClusterChoice))
    wrong: list[bytes] = []
    for _try in range(TRIES):
        if not keys:
            return 0
        seen = _Seen(a, keys)
        seen.look()
        catch_up(seen.look)
        there = b.batch_get(keys)
        seen.look()
        keys = [key for key in keys if _digest(there.get(key)) not in seen.values[key]]
        wrong = [key for key in keys if len(seen.values[key]) == 1]
    if wrong:
        raise DifferencesFound(
            f"{len(wrong)} keys of the target differ from the source's, {min(wrong).hex()} the first",
            hint="Compare by `tikv-br diff`; this may be a defect of tikv-br, or somebody writes to the target.",
        )
    return len(keys)


class _Seen:
    """What values some keys have had while they were looked at."""

    def __init__(self, raw: RawClient, keys: Sequence[bytes]) -> None:
        self._raw = raw
        self.values: dict[bytes, set[bytes | None]] = {key: set() for key in keys}

    def look(self) -> None:
        """Look once more."""
        found = self._raw.batch_get(self.values)
        for key, values in self.values.items():
            values.add(_digest(found.get(key)))


def _digest(value: bytes | None) -> bytes | None:
    return None if value is None else hashlib.blake2b(value, digest_size=16).digest()


def _nothing() -> None:
    """Nothing is done meanwhile."""


def _raw(side: ClusterChoice) -> RawClient:
    cluster = shared_cluster(side.config)
    return cluster.raw(cluster.pd.keyspace_id(side.keyspace), below=side.below)
