"""Comparison of the target with a source that is still written to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.rawkv import RawClient
from tikv_br.diff.options import ClusterChoice, DiffOptions
from tikv_br.diff.run import DiffResult, diff
from tikv_br.errors import DifferencesFound
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Reporter

MAX_KEYS = 2000
"""Maximum number of differing keys that are read one by one; with more, their ranges are compared again."""
ROUNDS = 5
TRIES = 3
CatchUp = Callable[[Callable[[], None]], None]
"""Returns when B has all that A had at the time of the call; until then it calls its argument repeatedly."""


@dataclass(frozen=True, slots=True)
class LiveDiff:
    """The result of a comparison that found no difference."""

    rows: int
    bytes: int
    changing: int
    """Keys that changed at the source between any two reads, so they cannot be compared."""


def compare_live(clusters: ClusterPool, options: DiffOptions, catch_up: CatchUp, reporter: Reporter) -> LiveDiff:
    """Compare A, which is still written to, with B, which follows it.

    Raises `DifferencesFound` for a key that differs although A has not changed it.
    """
    found = [diff(replace(options, keys=MAX_KEYS), reporter)]
    rows, size = found[0].summary.rows, found[0].summary.bytes
    for _round in range(ROUNDS):
        remaining = sum(each.summary.remaining for each in found)
        if remaining == sum(len(each.keys) for each in found):
            keys = [difference.key for each in found for difference in each.keys]
            return LiveDiff(rows, size, _follow_keys(clusters, options, keys, catch_up))
        catch_up(lambda: None)
        found = [diff(replace(options, keys=MAX_KEYS, span=span), reporter) for span in _spans(found)]
    raise DifferencesFound(
        f"{remaining} keys of the target differ from the source's in each of {ROUNDS} comparisons",
        hint="If the source is written to that much, stop writes during the cut-over. Else compare with `tikv-br diff`.",
    )


def _spans(found: Sequence[DiffResult]) -> list[KeyRange]:
    """The ranges that differ, with adjacent ones merged."""
    spans: list[KeyRange] = []
    for span in sorted(each.span for result in found for each in result.ranges):
        if spans and spans[-1].end == span.start:
            spans[-1] = KeyRange(spans[-1].start, span.end)
        else:
            spans.append(span)
    return spans


def _follow_keys(clusters: ClusterPool, options: DiffOptions, keys: Sequence[bytes], catch_up: CatchUp) -> int:
    """Check that B has what A had, for each key; returns how many changed too fast to compare."""
    a, b = (_raw(clusters, side) for side in (options.a, options.b) if isinstance(side, ClusterChoice))
    wrong: list[bytes] = []
    for _try in range(TRIES):
        if not keys:
            return 0
        seen = _SourceValues(a, keys)
        seen.read()
        catch_up(seen.read)
        there = b.batch_get(keys)
        seen.read()
        keys = [key for key in keys if _digest(there.get(key)) not in seen.digests[key]]
        wrong = [key for key in keys if len(seen.digests[key]) == 1]
    if wrong:
        raise DifferencesFound(
            f"{len(wrong)} keys of the target differ from the source's, the first is {min(wrong).hex()}",
            hint="Compare with `tikv-br diff`. Either somebody writes to the target, or this is a defect of tikv-br.",
        )
    return len(keys)


class _SourceValues:
    def __init__(self, raw: RawClient, keys: Sequence[bytes]) -> None:
        self._raw = raw
        self.digests: dict[bytes, set[bytes | None]] = {key: set() for key in keys}

    def read(self) -> None:
        found = self._raw.batch_get(self.digests)
        for key, digests in self.digests.items():
            digests.add(_digest(found.get(key)))


def _digest(value: bytes | None) -> bytes | None:
    return None if value is None else hashlib.blake2b(value, digest_size=16).digest()


def _raw(clusters: ClusterPool, side: ClusterChoice) -> RawClient:
    cluster = clusters.get(side.config)
    return cluster.raw(chosen_keyspace(cluster, side.keyspace))
