"""The overview made from the values of sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.unit.serve.samples import (
    CLUSTER,
    HOUR_MS,
    NOW_MS,
    ROOT,
    SPAN,
    backups,
    drill,
    entry,
    gc_report,
    healthy,
    log,
    overview,
    service,
    troubled,
)
from tikv_br.archive.records import InexactPeriod, LogState
from tikv_br.backupset.index import IndexEntry
from tikv_br.cluster.timestamps import compose, physical_ms
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.serve.findings import AgeLimit, OverviewLimits
from tikv_br.serve.model import ReadState, States, Window
from tikv_br.serve.sources import Backups, Baseline, Log
from tikv_br.serve.watcher import find_windows


def test_chains() -> None:
    """The chain with the newest backup first, each backup before those that continue it; a branch after the branch before."""
    found = backups(
        entry("old", 90.0),
        entry("full", 50.0),
        entry("second", 40.0, "full"),
        entry("third", 3.0, "second"),
        entry("branch", 30.0, "full"),
        entry("alone", 20.0, "elsewhere"),
        entry("newer", 10.0),
    )
    (storage,) = overview(States(backups=(found,))).storages
    assert [(each.path, each.depth) for each in storage.backups] == [
        ("full", 0),
        ("second", 1),
        ("third", 2),
        ("branch", 1),
        ("newer", 0),
        ("alone", 0),
        ("old", 0),
    ]
    assert storage.backups[1].parent == storage.backups[0].url == ROOT.child("full").redacted()


def test_a_circle_of_backups_is_shown() -> None:
    """Entries that nobody can have written in good faith neither vanish nor hang the page."""
    found = backups(entry("a", 2.0, "b"), entry("b", 1.0, "a"), entry("self", 3.0, "self"))
    (storage,) = overview(States(backups=(found,))).storages
    assert sorted(each.path for each in storage.backups) == ["a", "b", "self"]


def windows(made: ReadState[Log], *, hours: float = 10.0, baseline: Baseline | str | None = None) -> tuple[Window, ...]:
    """The windows of one backup and one log."""
    state = backups(entry("b", hours))
    assert state.value is not None
    (name,) = state.value.baselines
    if baseline is not None:
        state = replace(state, value=replace(state.value, baselines={name: baseline}))
    return find_windows(States(backups=(state,), logs=(made,)))[ROOT.redacted(), name]


def test_a_window_is_from_the_end_of_the_scan_to_the_end_of_the_log() -> None:
    """Both ends, as timestamps and as milliseconds."""
    (found,) = windows(log("east"))
    assert (found.from_ts, found.to_ts) == (compose(NOW_MS - 10 * HOUR_MS), compose(NOW_MS - 31_400))
    assert (found.from_ms, found.to_ms) == (physical_ms(found.from_ts), physical_ms(found.to_ts))
    assert (found.log_id, found.problem) == ("east", "")


def test_a_window_ends_before_a_scan_window_at_the_end() -> None:
    """Times at which the log lacks versions cannot be restored."""
    lacks = InexactPeriod(SPAN.start, SPAN.end, compose(NOW_MS - HOUR_MS), compose(NOW_MS))
    (found,) = windows(log(inexact=(lacks,)))
    assert found.to_ms == NOW_MS - HOUR_MS


def test_a_window_starts_after_a_scan_window_at_the_start() -> None:
    """As of a log that was started from the backup; until the log has passed it, no time can be restored."""
    lacks = InexactPeriod(SPAN.start, SPAN.end, compose(NOW_MS - 11 * HOUR_MS), compose(NOW_MS - 9 * HOUR_MS))
    (found,) = windows(log(inexact=(lacks,)))
    assert found.from_ms == NOW_MS - 9 * HOUR_MS
    (early,) = windows(log(inexact=(lacks,), lag=9.5 * 3600))
    assert early.problem == "the log has not reached the end of a scan window"


@pytest.mark.parametrize(
    ("made", "baseline"),
    [
        (log(hours=5.0), None),
        (log(), Baseline(CLUSTER + 1, (SPAN,), compose(NOW_MS - HOUR_MS), compose(NOW_MS - HOUR_MS))),
        (log(), Baseline(CLUSTER, (KeyRange(b"", b""),), compose(NOW_MS - HOUR_MS), compose(NOW_MS - HOUR_MS))),
        (log(hours=5.0), "it cannot be read"),
    ],
    ids=["the log starts later", "another cluster", "more keys", "unreadable, and older than the log"],
)
def test_no_window(made: ReadState[Log], baseline: Baseline | str | None) -> None:
    """A log that cannot continue the backup is not named beside it."""
    assert windows(made, baseline=baseline) == ()


def test_why_there_is_no_window() -> None:
    """A log that could continue the backup, but lacks something, or a backup that cannot be read: said, without times."""
    (early,) = windows(log(lag=36_030.0), hours=10.0)
    assert early.problem == "the log has not reached the end of its scan"
    (unreadable,) = windows(log(), baseline="the manifest is damaged")
    assert (unreadable.problem, unreadable.from_ms, unreadable.to_ms) == ("the manifest is damaged", 0, 0)
    made = log()
    assert made.value is not None
    late = structs.replace(made.value.archive.segments[0], from_ts=compose(NOW_MS - HOUR_MS))
    broken = replace(made, value=replace(made.value, archive=replace(made.value.archive, segments=(late,))))
    (gap,) = windows(broken, hours=10.0)
    assert gap.problem == "the log lacks changes after it"
    (after,) = windows(broken, hours=0.5)
    assert after.to_ms == NOW_MS - 31_400


def test_all_is_well() -> None:
    """Nothing is found, and the newest drill is first."""
    found = overview()
    assert found.findings == ()
    assert [each.started_ms for each in found.drills[0].drills] == sorted(
        (each.started_ms for each in found.drills[0].drills), reverse=True
    )
    assert [(each.service, each.holds_gc) for each in found.gc[0].services] == [
        ("tikv-br-sync-east", True),
        ("tikv-br-backup-20260921-9f3a1c", False),
    ]


def test_findings() -> None:
    """Each thing that is wrong is named once, with its section."""
    found = [(each.section, each.text) for each in overview(troubled()).findings]
    assert [section for section, _ in found] == [
        *("backups", "logs", "syncs", "drills", "backups"),
        *("logs", "logs", "logs", "syncs", "syncs", "syncs", "drills", "gc"),
    ]
    texts = " | ".join(text for _, text in found)
    for said in (
        "cannot read s3://other/full: s3://other/full denied access",
        "the newest backup in s3://backups/full?endpoint=https://s3.example.com&region=eu-1 is more than 30 h old: 2026-09-21",
        "log late is 4,000 s behind, which is more than 300 s",
        "log gaps has no changes of keys a to b",
        "segments/1.json is missing",
        "west is degraded: the source's PD",
        "new: has not started yet",
        "the last drill failed",
        "the GC safe point is 210 h old: tikv-br-sync-forgotten holds it back",
    ):
        assert texts.count(said) == 1


@pytest.mark.parametrize(
    ("states", "count"),
    [
        (States(logs=(log(lag=299.0),)), 0),
        (States(logs=(log(lag=301.0),)), 1),
        (States(logs=(log(lag=90_000.0, state=LogState.PAUSED),)), 0),
        (States(gc=(ReadState("pd", gc_report(hours=23.9)),)), 0),
        (States(gc=(ReadState("pd", gc_report(service("x", 24.2), hours=24.2)),)), 1),
        (States(drills=(ReadState("d", (drill(2, "failed"), drill(1))),)), 0),
        (States(drills=(ReadState("d", (drill(2), drill(1, "missed"))),)), 1),
        (
            States(
                gc=(ReadState("pd"),),
                logs=(ReadState("l"),),
                drills=(ReadState("d"),),
                backups=(ReadState("b"),),
                syncs=(ReadState("s"),),
            ),
            0,
        ),
    ],
)
def test_when_something_is_found(states: States, count: int) -> None:
    """The limits; a paused log has no lag, only the last drill counts, and what was not read yet is no finding."""
    assert len(overview(states).findings) == count


AGES = (AgeLimit(30 * 3600.0), AgeLimit(8 * 86400.0, "weekly/"), AgeLimit(3600.0, "s3://backups/full/hourly"))


@pytest.mark.parametrize(
    ("entries", "old"),
    [
        ([entry("a", 29.0)], []),
        ([entry("a", 31.0)], [""]),
        ([entry("a", 31.0), entry("drill-20260921T080000-abcdef", 6.0)], [""]),
        ([entry("a", 31.0), entry("b", 2.0, scope="1" * 16, total_bytes=100)], [""]),
        ([entry("a", 31.0), entry("b", 2.0, scope="1" * 16)], []),
        ([entry("a", 31.0), entry("weekly/a", 2.0)], [""]),
        ([entry("a", 2.0), entry("weekly/a", 31.0)], []),
        ([entry("a", 2.0), entry("weekly/a", 200.0)], ["weekly/"]),
        ([entry("a", 2.0), entry("hourly/a", 2.0)], ["s3://backups/full/hourly"]),
    ],
    ids=[
        "new",
        "old",
        "a drill's is new",
        "one of a part is new",
        "a larger one is new",
        "weekly is new",
        "weekly may be older",
        "weekly is old",
        "a URL",
    ],
)
def test_the_newest_backup_may_not_be_too_old(entries: list[IndexEntry], old: list[str]) -> None:
    """Backups that a limit of their own is for do not make others look new, and neither do those of drills or an occasional one of a part."""
    names = {"weekly/": "weekly/", "s3://backups/full/hourly": "hourly/"}
    ages = tuple(
        each for each in AGES if not each.prefix or any(one.path.startswith(names[each.prefix]) for one in entries)
    )
    found = overview(States(backups=(backups(*entries),)), OverviewLimits(ages=ages))
    assert [each.prefix for each in found.storages[0].newest if each.too_old] == old
    assert [each.section for each in found.findings] == ["backups"] * len(old)
    assert all("--max-backup-age" in each.advice for each in found.findings)


def test_no_backup_at_all() -> None:
    """A storage without a backup needs attention, unless any age will do; a backup of a drill is known by its report as well."""
    empty = States(backups=(backups(),))
    (finding,) = overview(empty).findings
    assert finding.text.startswith("there is no backup in s3://backups/full")
    assert overview(empty, OverviewLimits(ages=(AgeLimit(0.0),))).findings == ()
    made = entry("by-hand", 1.0)
    known = States(backups=(backups(made),), drills=(ReadState("d", (drill(1, made_backup=made.id),)),))
    assert [each.path for each in overview(known).storages[0].newest] == [""]
    assert overview(known).backups[0].made_by_drill


def test_gc_that_never_ran() -> None:
    """Everything is kept; a PD that was not read yet is no finding."""
    (finding,) = overview(States(gc=(ReadState("pd", replace(gc_report(), safe_point=0), NOW_MS),))).findings
    assert finding.text.startswith("GC has never run in pd")
    assert "tikv-br gc run" in finding.advice


def test_each_finding_says_what_to_do() -> None:
    """Also an error without a hint."""
    found = overview(replace(troubled(), backups=(ReadState("b", error="away"),))).findings
    assert len(found) > 10
    assert all(each.advice for each in found)


def test_an_error_leaves_what_was_read_before() -> None:
    """The values stay, with the time that they are of."""
    old = healthy().backups[0]
    found = overview(States(backups=(replace(old, error="away", hint="wait"),)))
    assert len(found.storages[0].backups) == 5
    assert (found.storages[0].source.error, found.storages[0].source.read_ms) == ("away", old.read_ms)
    assert isinstance(old.value, Backups)
