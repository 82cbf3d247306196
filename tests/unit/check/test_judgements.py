"""Outcomes of probes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tikv_br.check.cluster_probes import judge_clock, judge_gc, judge_space, judge_stores, judge_version
from tikv_br.check.probe import Status
from tikv_br.check.storage_probes import judge_space as judge_folder
from tikv_br.cluster.clock import ClockDifference
from tikv_br.cluster.pd_http import GcStatus, ServiceSafePoint, StoreStatus
from tikv_br.cluster.timestamps import compose
from tikv_br.formats.api_version import ApiVersion

STORE = StoreStatus(1, "host:20160", "8.5.2", "Up", 1000, 500, is_tiflash=False)
HOUR = 3_600_000
V1, V2 = ApiVersion.V1, ApiVersion.V2


@pytest.mark.parametrize(
    ("stores", "status", "said"),
    [
        ([STORE, replace(STORE, id=2)], Status.OK, "2 up, version 8.5.2"),
        ([STORE, replace(STORE, id=2, state="Down")], Status.FAIL, "store 2 (host:20160) is Down"),
        ([STORE, replace(STORE, id=2, state="Offline")], Status.WARN, "Offline"),
        ([STORE, replace(STORE, id=2, version="8.1.0")], Status.WARN, "8.1.0, 8.5.2"),
        ([STORE, replace(STORE, id=2, version="7.0.0", is_tiflash=True)], Status.OK, "1 up"),
        ([], Status.FAIL, "no store"),
    ],
)
def test_stores(stores: list[StoreStatus], status: Status, said: str) -> None:
    """Each must be up; unequal versions are worth a word; TiFlash does not count."""
    verdict = judge_stores(stores)
    assert verdict.status is status
    assert said in verdict.seen
    assert bool(verdict.advice) == (status is not Status.OK)


@pytest.mark.parametrize(
    ("available", "status"), [(500, Status.OK), (200, Status.OK), (199, Status.WARN), (99, Status.FAIL)]
)
def test_space_of_stores(available: int, status: Status) -> None:
    """The fullest store decides, and every one has its figure."""
    verdict = judge_space([STORE, replace(STORE, id=7, available=available)])
    assert verdict.status is status
    assert {figure.label: figure.value for figure in verdict.figures} == {
        "free_store1": 50.0,
        "free_store7": available / 10,
    }


def test_space_that_pd_does_not_know() -> None:
    """A capacity of 0 is no full disk."""
    assert judge_space([replace(STORE, capacity=0, available=0)]).status is Status.SKIPPED


@pytest.mark.parametrize(
    ("ahead", "status", "said"),
    [
        (0.4, Status.OK, "0.400 s ahead"),
        (-0.9, Status.OK, "behind"),
        (-1.5, Status.WARN, "1.500 s behind"),
        (5.1, Status.FAIL, "ahead"),
    ],
)
def test_clock(ahead: float, status: Status, said: str) -> None:
    """Either direction counts."""
    verdict = judge_clock(ClockDifference(ahead))
    assert verdict.status is status
    assert said in verdict.seen


def test_clock_after_changes_of_pds_leader() -> None:
    """Timestamps that changes of the leader have moved ahead say nothing about the clocks, and pass."""
    verdict = judge_clock(ClockDifference(-18, stalled=True))
    assert verdict.status is Status.WARN
    assert "18.0 s ahead of the clocks, after changes of PD's leader" in verdict.seen


def test_gc() -> None:
    """The oldest service is named; held for more than a day it is worth a warning."""
    now = 100 * HOUR
    services = (
        ServiceSafePoint("backup-1", compose(now - 2 * HOUR), 0),
        ServiceSafePoint("cdc-9", compose(now - 25 * HOUR), 0),
    )
    assert judge_gc(GcStatus(0, ()), now).status is Status.OK
    assert judge_gc(GcStatus(compose(now - HOUR), services[:1]), now).status is Status.OK
    held = judge_gc(GcStatus(compose(now - 26 * HOUR), services), now)
    assert held.status is Status.WARN
    assert "2 service safe points, the oldest by cdc-9 (25.0 h)" in held.seen
    assert "cdc-9" in held.advice
    assert {figure.label: figure.value for figure in held.figures}["oldest_service"] == 25 * 3600


@pytest.mark.parametrize(
    ("versions", "status", "said"),
    [
        (["8.5.7", "8.5.2"], Status.OK, "8.5.2"),
        (["6.5.4"], Status.OK, "without one feed stream for many regions"),
        (["7.1.2", "6.5.3"], Status.OK, "6.5.3; without expiry in the properties of SSTs"),
        (["6.2.0"], Status.OK, "without the deadline of raw writes"),
        (["6.1.1", "8.5.2"], Status.WARN, "6.1.1: API V2 (all commands) needs 6.2.0; a change feed"),
        (["9.1.0"], Status.WARN, "the newest version that tikv-br was tried with is 9.0.0-beta.2"),
        ([], Status.SKIPPED, "no store"),
    ],
)
def test_version_of_stores(versions: list[str], status: Status, said: str) -> None:
    """The oldest store decides what a cluster can do, and the newest one whether its version is known."""
    verdict = judge_version(versions)
    assert verdict.status is status
    assert said in verdict.seen


@pytest.mark.parametrize(
    ("version", "api_version", "check_skipped", "status", "advice"),
    [
        ("6.1.7", V2, False, Status.FAIL, "all commands refuse"),
        ("6.1.7", V2, True, Status.WARN, "may fail"),
        ("6.1.7", V1, False, Status.OK, ""),
        ("6.1.0", V1, False, Status.WARN, "these commands refuse"),
        ("5.3.0", V1, False, Status.FAIL, "all commands refuse"),
    ],
)
def test_a_version_that_all_commands_refuse_is_a_failure(
    version: str, api_version: ApiVersion, check_skipped: bool, status: Status, advice: str
) -> None:
    """By the API version of the cluster: what V1 never uses is not missing there."""
    verdict = judge_version([version], api_version, check_skipped=check_skipped)
    assert (verdict.status, advice in verdict.advice) == (status, True)
    assert ("change feed" in verdict.seen) == (api_version is V2)


@pytest.mark.parametrize(
    ("free", "total", "status"),
    [
        (30, 100, Status.OK),
        (19, 100, Status.WARN),
        (4, 100, Status.FAIL),
        (2000, 20_000, Status.OK),  # 10 %, but plenty
        (90, 20_000, Status.WARN),
        (8, 252, Status.WARN),  # 3 %
        (4, 252, Status.FAIL),
    ],
)
def test_space_of_a_directory(free: int, total: int, status: Status) -> None:
    """In GiB: a small part of a large file system is enough."""
    verdict = judge_folder(free << 30, total << 30)
    assert verdict.status is status
    (figure,) = (each for each in verdict.figures if each.label == "storage_free_bytes")
    for limit, below in ((figure.warn, status is not Status.OK), (figure.critical, status is Status.FAIL)):
        assert (figure.value < int(limit.removesuffix(":"))) is below
