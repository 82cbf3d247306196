"""A span is covered without hole or overlap, whatever the regions do, and its resolved-ts never lies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from incremental.feed.coverage import Coverage, Piece

KEYS = 16
"""The model's keys are the bytes 0..KEYS-1; the span is [2, KEYS - 2), so that regions reach beyond it."""
FIRST, LAST = 2, KEYS - 2


@dataclass(frozen=True)
class ModelRegion:
    """A region of the model: keys [start, end)."""

    id: int
    version: int
    start: int
    end: int


@dataclass
class ModelSubscription:
    """What the model's servers do for a subscription."""

    region: ModelRegion
    piece: Piece
    cursor: int
    """Changes up to here were delivered to it."""


@dataclass
class World:
    """Regions that hold keys, and the changes of keys."""

    regions: list[ModelRegion] = field(default_factory=lambda: [ModelRegion(1, 1, 0, KEYS)])
    changes: list[tuple[int, int]] = field(default_factory=list)  # (ts, key)
    subscriptions: dict[tuple[int, int], ModelSubscription] = field(default_factory=dict)
    dying: list[tuple[int, int]] = field(default_factory=list)


class CoverageMachine(RuleBasedStateMachine):
    """Servers that split, merge, fail and lag, and a client that knows only what it was told, perhaps long ago."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.seen: list[ModelRegion] = list(self.world.regions)
        self.clock = 1
        self.next_id = 2
        self.coverage = Coverage(bytes([FIRST]), bytes([LAST]), 1)
        self.delivered: set[tuple[int, int]] = set()
        self.reached = 1

    @rule(key=st.integers(0, KEYS - 1))
    def write(self, key: int) -> None:
        """A client changes a key."""
        self.clock += 1
        self.world.changes.append((self.clock, key))

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """A region splits: both halves are of a newer version, and its subscriptions die."""
        wide = [region for region in self.world.regions if region.end - region.start > 1]
        if not wide:
            return
        old = data.draw(st.sampled_from(wide))
        middle = data.draw(st.integers(old.start + 1, old.end - 1))
        left = ModelRegion(self.next_id, old.version + 1, old.start, middle)
        right = ModelRegion(old.id, old.version + 1, middle, old.end)
        self.next_id += 1
        self.replace([old], [left, right])

    @precondition(lambda self: len(self.world.regions) > 1)
    @rule(data=st.data(), keep_left=st.booleans())
    def merge(self, data: st.DataObject, keep_left: bool) -> None:
        """Two neighbours merge under the id of either."""
        ordered = sorted(self.world.regions, key=lambda region: region.start)
        at = data.draw(st.integers(0, len(ordered) - 2))
        left, right = ordered[at : at + 2]
        version = max(left.version, right.version) + 1
        kept = left.id if keep_left else right.id
        self.replace([left, right], [ModelRegion(kept, version, left.start, right.end)])

    def replace(self, old: list[ModelRegion], new: list[ModelRegion]) -> None:
        """Regions give way to others; who subscribed to them will hear of it later."""
        self.world.regions = [region for region in self.world.regions if region not in old] + new
        self.seen += new
        for key, subscription in self.world.subscriptions.items():
            if subscription.region in old and key not in self.world.dying:
                self.world.dying.append(key)

    @precondition(lambda self: self.world.subscriptions)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A subscription ends for any other reason: a leader moves, a store dies, a server is congested."""
        key = data.draw(st.sampled_from(sorted(self.world.subscriptions)))
        if key not in self.world.dying:
            self.world.dying.append(key)

    @precondition(lambda self: self.world.dying)
    @rule(data=st.data())
    def hear_of_an_end(self, data: st.DataObject) -> None:
        """An error arrives at the client."""
        key = data.draw(st.sampled_from(self.world.dying))
        self.world.dying.remove(key)
        self.coverage.lose(self.world.subscriptions.pop(key).piece)

    @rule(data=st.data())
    def subscribe(self, data: st.DataObject) -> None:
        """The client subscribes by what it once knew; a server of another version answers with an error."""
        region = data.draw(st.sampled_from(self.seen[-12:]))
        self.register(region)
        key = (region.id, self.next_id)
        if region not in self.world.regions and key in self.world.subscriptions:
            self.world.dying.append(key)

    @rule()
    def subscribe_to_all(self) -> None:
        """A client that knows all regions fills every hole; stale subscriptions may leave one for a second look."""
        for region in self.world.regions * 2:
            self.register(region)
        assert not self.coverage.holes

    def register(self, region: ModelRegion) -> None:
        """Claim a region, and subscribe when that is granted."""
        self.next_id += 1
        claim = self.coverage.claim(
            bytes([region.start]),
            bytes([region.end]) if region.end < KEYS else b"",
            region_id=region.id,
            version=region.version,
            request_id=self.next_id,
        )
        if claim is None:
            return
        for key in claim.replaced:
            del self.world.subscriptions[key]
            if key in self.world.dying:
                self.world.dying.remove(key)
        key = (region.id, self.next_id)
        self.world.subscriptions[key] = ModelSubscription(region, claim.piece, claim.piece.resolved)

    @rule()
    def resolve(self) -> None:
        """Every living subscription delivers its changes, then says how far it is."""
        for key, subscription in self.world.subscriptions.items():
            if key in self.world.dying:
                continue
            region = subscription.region
            self.delivered |= {
                (ts, changed)
                for ts, changed in self.world.changes
                if ts > subscription.cursor and region.start <= changed < region.end
            }
            subscription.cursor = self.clock
            self.coverage.advance(subscription.piece, self.clock)

    @invariant()
    def pieces_touch_and_do_not_overlap(self) -> None:
        """From the first key to the last there is exactly one piece."""
        pieces = list(self.coverage)
        assert (pieces[0].start, pieces[-1].end) == (bytes([FIRST]), bytes([LAST]))
        assert all(one.start < one.end for one in pieces)
        assert all(one.end == other.start for one, other in itertools.pairwise(pieces))

    @invariant()
    def subscriptions_are_the_pieces_that_are_no_holes(self) -> None:
        """Nothing is subscribed that no piece stands for, and no piece claims what nobody delivers."""
        held = {(piece.region_id, piece.request_id) for piece in self.coverage if not piece.is_hole}
        assert held == set(self.world.subscriptions)

    @invariant()
    def resolved_ts_never_moves_back_and_never_lies(self) -> None:
        """Every change of the span up to the resolved-ts has been delivered."""
        resolved = self.coverage.resolved
        assert resolved >= self.reached
        self.reached = resolved
        due = {(ts, key) for ts, key in self.world.changes if ts <= resolved and FIRST <= key < LAST}
        assert due <= self.delivered


TestCoverage = CoverageMachine.TestCase
TestCoverage.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_hole_holds_the_resolved_ts_back() -> None:
    """One region of two that is not subscribed to keeps the whole span where it was."""
    coverage = Coverage(b"a", b"z", 5)
    claim = coverage.claim(b"", b"m", region_id=1, version=1, request_id=1)
    assert claim is not None
    coverage.advance(claim.piece, 9)
    assert coverage.resolved == 5
    other = coverage.claim(b"m", b"", region_id=2, version=1, request_id=1)
    assert other is not None
    coverage.advance(other.piece, 7)
    assert coverage.resolved == 7
    coverage.lose(claim.piece)
    coverage.advance(other.piece, 20)
    assert coverage.resolved == 9


def test_a_merged_region_goes_on_from_the_slower_half() -> None:
    """What a subscription of a merged region is asked for begins at the lesser resolved-ts of its parts."""
    coverage = Coverage(b"a", b"z", 5)
    for region_id, (start, end, ts) in enumerate([(b"", b"m", 9), (b"m", b"", 7)], 1):
        claim = coverage.claim(start, end, region_id=region_id, version=1, request_id=1)
        assert claim is not None
        coverage.advance(claim.piece, ts)
    left, _ = coverage
    coverage.lose(left)
    merged = coverage.claim(b"", b"", region_id=2, version=2, request_id=2)
    assert merged is not None
    assert (merged.piece.resolved, merged.replaced) == (7, ((2, 1),))
    assert len(coverage) == 1


def test_old_knowledge_does_not_displace_newer() -> None:
    """A region as it was before its split fills no hole beside the half that is followed already."""
    coverage = Coverage(b"a", b"z", 5)
    assert coverage.claim(b"", b"m", region_id=1, version=2, request_id=1) is not None
    assert coverage.claim(b"", b"", region_id=1, version=1, request_id=2) is None
    assert [piece.is_hole for piece in coverage] == [False, True]


def test_an_empty_span_is_refused() -> None:
    """There is nothing to follow from a key to itself."""
    with pytest.raises(ValueError, match="empty"):
        Coverage(b"a", b"a", 1)
