"""Following a source without timestamps by passes that compare."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.incremental.conftest import Clusters
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents
from tests.support.waiting import eventually
from tikv_br.cluster.config import ClusterConfig
from tikv_br.compare.report import Report
from tikv_br.diff import run
from tikv_br.diff.places import ClusterChoice, DiffOptions
from tikv_br.diff.run import DiffContext
from tikv_br.diff.task import compare_units
from tikv_br.errors import (
    ApiVersionMismatch,
    ClusterUnreachable,
    ConversionUnsupported,
    RetryBudgetExhausted,
    TikvBrError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental import diff_mode
from tikv_br.incremental.diff_mode import DiffMode, DiffModeOptions, Pass
from tikv_br.incremental.sinks.url import TikvTarget

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
ROWS = {b"%c%04d" % (at % 250, at): b"v%d" % at for at in range(2000)}
EVERY_PAIR = [(V1, V1), (V1, V1TTL), (V1, V2), (V1TTL, V1), (V1TTL, V1TTL), (V1TTL, V2), (V2, V1)]

Pair = tuple[LiveCluster, LiveCluster]


@pytest.fixture
def pair(clusters: Clusters, targets: Clusters, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A source with rows and an empty target; V1TTL and V2 unless the test says others."""
    source_version, target_version = getattr(request, "param", (V1TTL, V2))
    source, target = clusters(source_version), targets(target_version)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    source.raw().batch_put(ROWS)
    yield source, target
    for live in (source, target):
        live.heal()


def options(pair: Pair) -> DiffModeOptions:
    """Passes from one cluster to the other."""
    source, target = (ClusterChoice(live.config) for live in pair)
    return DiffModeOptions(DiffOptions(source, target, keys=0, executor="driver", concurrency=2), interval=0.1)


def settled(pair: Pair) -> DiffMode:
    """Passes that have found everything equal: one wrote, and one has looked again at what was written."""
    following = DiffMode(options(pair))
    following.run_pass()
    assert following.run_pass().puts == 0
    return following


class Following(Background):
    """Passes for the length of a block."""

    def __init__(self, options: DiffModeOptions) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self._spawn(DiffMode(options, self._enough).run, self.passes.append)

    def until_more(self, more: int) -> None:
        """Wait for so many further passes."""
        wanted = len(self.passes) + more
        eventually(lambda: len(self.passes) >= wanted, 120)


@pytest.mark.parametrize("pair", EVERY_PAIR, indirect=True, ids=lambda pair: f"{pair[0].label}-{pair[1].label}")
def test_passes_bring_what_changed_and_look_at_nothing_else(pair: Pair) -> None:
    """The first pass brings all rows, the next finds them equal; later ones compare only ranges that changed."""
    source, target = pair
    following = DiffMode(options(pair))
    first = following.run_pass()
    assert contents(target) == ROWS
    assert (first.number, first.puts, first.deletes, first.remaining) == (1, len(ROWS), 0, 0)
    following.run_pass()
    source.raw().put(b"\x01new", b"row")
    source.raw().put(b"\x00" + b"0000", b"other value")
    source.raw().delete(b"\x020002")
    third = following.run_pass()
    assert contents(target) == contents(source)
    assert (third.puts, third.deletes) == (2, 1)
    assert 0 < third.changed_ranges < third.ranges


def test_unchanged_ranges_are_not_scanned(pair: Pair) -> None:
    """A quiet pass costs two checksums a range, and not a row."""
    following = settled(pair)
    scans = [live.fail("RawScan", {"delay": {"seconds": 0.0}}, count=-1) for live in pair]
    quiet = following.run_pass()
    assert quiet.ranges >= 6
    assert (quiet.changed_ranges, quiet.checksum_requests, quiet.scanned_bytes) == (0, 2 * quiet.ranges, 0)
    assert [live.hits(scan) for live, scan in zip(pair, scans, strict=True)] == [0, 0]


def test_ranges_that_were_deleted_go(pair: Pair) -> None:
    """RawDeleteRange, which no feed shows, is a change as any other."""
    source, target = pair
    following = settled(pair)
    source.raw().delete_range(KeyRange(b"\x10", b"\x90"))
    assert following.run_pass().deletes == sum(b"\x10" <= key < b"\x90" for key in ROWS)
    assert contents(target) == contents(source)


def test_an_exact_pass_sees_what_checksums_do_not(pair: Pair) -> None:
    """The same change in two rows of a range cancels out: passes overlook it, the exact one among them does not."""
    source, target = pair
    source.raw().batch_put({b"\x05one": b"before", b"\x05two": b"before"})
    following = settled(pair)
    source.raw().batch_put({b"\x05one": b"later!", b"\x05two": b"later!"})
    assert following.run_pass().changed_ranges == 0
    with Following(replace(options(pair), exact_every=2)) as exact:
        exact.until_more(4)
    assert [each.exact for each in exact.passes[:4]] == [False, True, False, True]
    assert [each.puts for each in exact.passes[:4]] == [0, 2, 0, 0]
    assert contents(target) == contents(source)


@pytest.mark.parametrize("pair", [(V1TTL, V1TTL), (V1TTL, V2)], indirect=True, ids=["v1ttl", "v2"])
def test_expiries_go_along(pair: Pair) -> None:
    """Rows expire at the target when they do at the source; a longer time is seen once the old one is over."""
    source, target = pair
    source.raw().put(b"year", b"v", ttl=365 * 86400)
    following = settled(pair)
    here, there = (live.raw().get_ttl(b"year") for live in pair)
    assert here is not None
    assert there is not None
    assert abs(here - there) <= 2
    # Only now: passes that take eight seconds would find rows that are over at one side and not yet at the other.
    source.raw().put(b"soon", b"v", ttl=8)
    source.raw().put(b"longer", b"v", ttl=8)
    following.run_pass()
    source.raw().put(b"longer", b"v", ttl=5000)
    eventually(lambda: not target.raw().batch_get([b"soon", b"longer"]) and not source.raw().batch_get([b"soon"]), 60)
    following.run_pass()
    assert contents(target) == contents(source)
    assert (target.raw().get_ttl(b"longer") or 0) > 4000


def test_a_row_that_lives_on_after_all_comes(pair: Pair) -> None:
    """A row that was about to expire when it was compared, and was left out, comes once it is written again as it is."""
    source, target = pair
    following = settled(pair)
    source.raw().put(b"brief", b"v", ttl=4)
    following.run_pass()
    source.raw().put(b"brief", b"v")
    following.run_pass()
    assert contents(target) == contents(source)


def test_splits_between_passes_lose_nothing(pair: Pair) -> None:
    """Ranges of new regions are compared, and known from then on."""
    source, target = pair
    following = settled(pair)
    codec = source.raw().codec
    source.split(codec.bound(codec.rpc_key(b"\x77")))
    source.raw().put(b"\x77x", b"row")
    assert following.run_pass().puts == 1
    following.run_pass()
    assert following.run_pass().changed_ranges == 0
    assert contents(target) == contents(source)


def test_a_row_that_goes_back_and_forth_is_not_taken_for_equal(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums from before a change say nothing of rows that were compared after it."""
    source, target = pair
    following = DiffMode(options(pair))
    following.run_pass()
    target.raw().put(b"\x05flag", b"on")
    source.raw().put(b"\x05flag", b"off")

    def meanwhile_on(*arguments: object) -> Report:
        source.raw().put(b"\x05flag", b"on ")
        source.raw().put(b"\x05flag", b"on")
        return compare_units(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(diff_mode, "compare_units", meanwhile_on)
        assert following.run_pass().puts == 0
    source.raw().put(b"\x05flag", b"off")
    assert following.run_pass().puts == 1
    assert contents(target) == contents(source)


def test_runs_until_stopped_through_trouble(pair: Pair) -> None:
    """Under writes, with a target that does not answer for a while: once writes stop, a pass later both are equal."""
    source, target = pair
    with Following(options(pair)) as following:
        target.fail("RawBatchPut", {"region_error": {"region_not_found": {"region_id": 1}}}, count=20)
        for at in range(300):
            source.raw().put(b"%c-live" % (at % 250), b"%d" % at)
        following.until_more(2)  # the second began after the writes
    assert contents(target) == contents(source)
    assert [each.number for each in following.passes] == list(range(1, len(following.passes) + 1))


class _StopSoon(threading.Event):
    """Set when it is looked at for the second time: after the first range."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_stop_does_not_wait_for_the_pass(pair: Pair) -> None:
    """The running pass is interrupted between two ranges, and does not count as finished."""
    _, target = pair
    passes: list[Pass] = []
    DiffMode(options(pair), _StopSoon()).run(passes.append)
    assert passes == []
    assert len(contents(target)) < len(ROWS)


def test_patience_ends(pair: Pair) -> None:
    """A target that stays away ends the passes."""
    pair[1].fail("RawChecksum", {"region_error": {"region_not_found": {"region_id": 1}}}, count=-1)
    source, target = (ClusterChoice(structs.replace(live.config, retry_budget=0.5)) for live in pair)
    with pytest.raises(RetryBudgetExhausted):
        DiffMode(DiffModeOptions(DiffOptions(source, target, executor="driver"), patience=0.0)).run(lambda _: None)


def test_a_cluster_that_is_down_at_the_start_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the patience a cluster that does not answer yet only delays the first pass."""
    monkeypatch.setattr(diff_mode, "RETRY_SECONDS", 0.05)
    down = ClusterChoice(ClusterConfig(pd=("127.0.0.1:1",), retry_budget=0.1))
    stop, failures = threading.Event(), list[TikvBrError]()

    def find_sides(context: DiffContext) -> None:
        run.find_sides(context if len(failures) >= 2 else DiffContext(structs.replace(context.options, b=down)))

    monkeypatch.setattr(diff_mode, "find_sides", find_sides)
    DiffMode(options(pair), stop).run(lambda _: stop.set(), on_failure=failures.append)
    assert [type(failure) for failure in failures] == [ClusterUnreachable] * 2
    assert contents(pair[1]) == ROWS


def test_a_cluster_that_stays_down_ends_it(pair: Pair) -> None:
    """The error names the option; a cluster that is another than was meant is an error at once."""
    source = ClusterChoice(pair[0].config)
    nobody = ClusterChoice(ClusterConfig(pd=("127.0.0.1:1",), retry_budget=0.1))
    with pytest.raises(ClusterUnreachable, match="longer than --sink-patience"):
        DiffMode(DiffModeOptions(DiffOptions(source, nobody, executor="driver"), patience=0.0)).run(lambda _: None)
    meant = TikvTarget(pair[1].config.pd, api_version=V1)
    with pytest.raises(ApiVersionMismatch, match="has API v2, not v1"):
        DiffMode(DiffModeOptions(options(pair).diff, meant.check)).run(lambda _: None)


@pytest.mark.parametrize("pair", [(V1TTL, V1)], indirect=True)
def test_an_expiry_that_the_target_cannot_keep_ends_it(pair: Pair) -> None:
    """From V1TTL to V1 a row that expires is not written without its expiry."""
    source, target = pair
    source.raw().put(b"\x05ttl", b"v", ttl=5000)
    with pytest.raises(ConversionUnsupported):
        DiffMode(options(pair)).run(lambda _: None)
    assert b"\x05ttl" not in contents(target)
