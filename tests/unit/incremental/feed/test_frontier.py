"""The spans of a frontier cover the range without overlap, and its resolved-ts never covers an undelivered change."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tikv_br.incremental.feed.stream import RegionSpan, ResolvedFrontier

KEYS = 16
"""The model's keys are the bytes 0..KEYS-1; the range is [2, KEYS - 2), so that regions reach beyond it."""
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
    """The server's side of a subscription."""

    region: ModelRegion
    span: RegionSpan
    cursor: int
    """Changes up to this have been delivered."""


@dataclass
class World:
    """Regions that hold keys, and the changes of keys."""

    regions: list[ModelRegion] = field(default_factory=lambda: [ModelRegion(1, 1, 0, KEYS)])
    changes: list[tuple[int, int]] = field(default_factory=list)  # (ts, key)
    subscriptions: dict[tuple[int, int], ModelSubscription] = field(default_factory=dict)
    dying: list[tuple[int, int]] = field(default_factory=list)


class FrontierMachine(RuleBasedStateMachine):
    """Servers that split, merge, fail and lag, and a client with outdated information."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.seen: list[ModelRegion] = list(self.world.regions)
        self.clock = 1
        self.next_id = 2
        self.frontier = ResolvedFrontier(bytes([FIRST]), bytes([LAST]), 1)
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
    def receive_error(self, data: st.DataObject) -> None:
        """An error arrives at the client."""
        key = data.draw(st.sampled_from(self.world.dying))
        self.world.dying.remove(key)
        self.frontier.mark_gap(self.world.subscriptions.pop(key).span)

    @rule(data=st.data())
    def subscribe(self, data: st.DataObject) -> None:
        """The client subscribes to a region that may be outdated; then the server answers with an error."""
        region = data.draw(st.sampled_from(self.seen[-12:]))
        self.register(region)
        key = (region.id, self.next_id)
        if region not in self.world.regions and key in self.world.subscriptions:
            self.world.dying.append(key)

    @rule()
    def subscribe_to_all(self) -> None:
        """A client that knows all regions fills every gap; replaced subscriptions may leave one for a second pass."""
        for region in self.world.regions * 2:
            self.register(region)
        assert not self.frontier.gaps

    def register(self, region: ModelRegion) -> None:
        """Claim a region, and subscribe if the claim succeeds."""
        self.next_id += 1
        claim = self.frontier.claim(
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
        self.world.subscriptions[key] = ModelSubscription(region, claim.span, claim.span.resolved_ts)

    @rule()
    def resolve(self) -> None:
        """Every active subscription delivers its changes, then its resolved-ts."""
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
            self.frontier.advance(subscription.span, self.clock)

    @invariant()
    def pieces_touch_and_do_not_overlap(self) -> None:
        """From the first key to the last there is exactly one span."""
        spans = list(self.frontier)
        assert (spans[0].start, spans[-1].end) == (bytes([FIRST]), bytes([LAST]))
        assert all(one.start < one.end for one in spans)
        assert all(one.end == other.start for one, other in itertools.pairwise(spans))

    @invariant()
    def spans_match_subscriptions(self) -> None:
        """Every subscription has a span, and every span that is not a gap has a subscription."""
        held = {(span.region_id, span.request_id) for span in self.frontier if not span.is_gap}
        assert held == set(self.world.subscriptions)

    @invariant()
    def resolved_ts_is_monotonic_and_correct(self) -> None:
        """Every change of the range up to the resolved-ts has been delivered."""
        resolved = self.frontier.resolved_ts
        assert resolved >= self.reached
        self.reached = resolved
        due = {(ts, key) for ts, key in self.world.changes if ts <= resolved and FIRST <= key < LAST}
        assert due <= self.delivered


TestFrontier = FrontierMachine.TestCase
TestFrontier.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_gap_holds_the_resolved_ts_back() -> None:
    """If one of two regions has no subscription, the resolved-ts of the range does not advance."""
    frontier = ResolvedFrontier(b"a", b"z", 5)
    claim = frontier.claim(b"", b"m", region_id=1, version=1, request_id=1)
    assert claim is not None
    frontier.advance(claim.span, 9)
    assert frontier.resolved_ts == 5
    other = frontier.claim(b"m", b"", region_id=2, version=1, request_id=1)
    assert other is not None
    frontier.advance(other.span, 7)
    assert frontier.resolved_ts == 7
    frontier.mark_gap(claim.span)
    frontier.advance(other.span, 20)
    assert frontier.resolved_ts == 9


def test_a_merged_region_resumes_from_the_slower_half() -> None:
    """The subscription of a merged region starts from the lower resolved-ts of its parts."""
    frontier = ResolvedFrontier(b"a", b"z", 5)
    for region_id, (start, end, ts) in enumerate([(b"", b"m", 9), (b"m", b"", 7)], 1):
        claim = frontier.claim(start, end, region_id=region_id, version=1, request_id=1)
        assert claim is not None
        frontier.advance(claim.span, ts)
    left, _ = frontier
    frontier.mark_gap(left)
    merged = frontier.claim(b"", b"", region_id=2, version=2, request_id=2)
    assert merged is not None
    assert (merged.span.resolved_ts, merged.replaced) == (7, ((2, 1),))
    assert len(frontier) == 1


def test_outdated_regions_do_not_replace_newer_ones() -> None:
    """A region from before its split cannot claim the gap beside a half that has a subscription."""
    frontier = ResolvedFrontier(b"a", b"z", 5)
    assert frontier.claim(b"", b"m", region_id=1, version=2, request_id=1) is not None
    assert frontier.claim(b"", b"", region_id=1, version=1, request_id=2) is None
    assert [span.is_gap for span in frontier] == [False, True]


def test_an_empty_range_is_refused() -> None:
    """Start and end are the same key."""
    with pytest.raises(ValueError, match="empty"):
        ResolvedFrontier(b"a", b"a", 1)
