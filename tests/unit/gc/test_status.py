"""Owners of PD's safe points, and the one that limits GC."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tikv_br.cluster.pd_http import GcBarrier, GcStatus, ServiceSafePoint
from tikv_br.cluster.safepoint import BACKUP_SERVICES
from tikv_br.cluster.timestamps import compose
from tikv_br.errors import UsageError
from tikv_br.gc.metrics import WorkerFigures, write_metrics
from tikv_br.gc.status import FOREVER, GcReport, OwnerKind, owner_of, report
from tikv_br.incremental.handover import service_id as sync_service

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gc.md"
NOW = 1_800_000_000
"""PD's time in seconds."""


def at(seconds_ago: float) -> int:
    """A timestamp of so long ago."""
    return compose(round((NOW - seconds_ago) * 1000), 5)


def service(name: str, seconds_ago: float, ttl: int = 300) -> ServiceSafePoint:
    """A service safe point."""
    return ServiceSafePoint(name, at(seconds_ago), FOREVER if ttl == FOREVER else NOW + ttl)


def made(*services: ServiceSafePoint, gc: int = 0, worker: int = 0) -> GcReport:
    """The report of a PD that knows these."""
    return report(GcStatus(gc, services, worker), compose(NOW * 1000))


@pytest.mark.parametrize(
    ("name", "kind", "within"),
    [
        (f"{BACKUP_SERVICES}20260101-abc-0a1b2c3d", OwnerKind.BACKUP, "20260101-abc-0a1b2c3d"),
        (sync_service("east-1"), OwnerKind.SYNC, "east-1"),
        ("tikv-br-drill-7", OwnerKind.DRILL, "7"),
        ("br-5f0b", OwnerKind.GO_BR, "5f0b"),
        ("tikvcdc", OwnerKind.CDC, ""),
        ("tikvcdc-creating-x", OwnerKind.CDC, "-creating-x"),
        ("ops-team", OwnerKind.OTHER, "ops-team"),
    ],
)
def test_owners(name: str, kind: OwnerKind, within: str) -> None:
    """By the names that the programs use themselves."""
    owner = owner_of(name)
    assert (owner.kind, owner.name) == (kind, within)
    assert owner.is_ours is name.startswith("tikv-br-")


def test_a_safe_point_of_a_changefeed_that_is_created_is_explained() -> None:
    """TiKV-CDC leaves it behind for ten minutes, so nobody needs to look for its owner."""
    text = "create or resume of changefeed repl-1 of TiKV-CDC; expires automatically"
    assert str(owner_of("tikvcdc-creating-repl-1")) == text


def test_the_oldest_that_the_worker_would_pass_holds_gc() -> None:
    """It is named with the time since when; one that is younger than the worker's safe point holds nothing."""
    found = made(service("young", 5), service("old", 7200), service("older", 10800), gc=at(10800), worker=at(600))
    assert [each.service for each in found.services] == ["older", "old", "young"]
    assert found.holder is not None
    assert found.holder.service == "older"
    assert (found.lag, found.worker_lag, found.held_seconds) == (10800, 600, 10200)
    assert found.held_since_ms == (NOW - 10200) * 1000
    free = made(service("young", 5), gc=at(600), worker=at(600))
    assert (free.holder, free.held_seconds, free.held_since_ms) == (None, 0, 0)


def test_expired_safe_points_do_not_limit_gc() -> None:
    """PD lists it until its next update; GC does not wait for it."""
    found = made(service("gone", 7200, ttl=0), service("next", 3600, ttl=1), worker=at(600))
    assert [each.has_expired for each in found.services] == [True, False]
    assert found.holder is not None
    assert found.holder.service == "next"


def test_a_cluster_without_a_worker() -> None:
    """GC has never run: nothing has an age, and no service is to blame."""
    found = made(service("backup", 7200))
    assert (found.lag, found.worker_lag, found.holder) == (None, None, None)


def test_a_safe_point_for_ever() -> None:
    """It has no time left that could be shown."""
    assert made(service("pinned", 10, ttl=FOREVER)).services[0].ttl is None


def test_barriers_of_newer_pds(tmp_path: Path) -> None:
    """A global one that the worker has reached holds GC; one of a keyspace holds that keyspace's own GC only."""
    barriers = (
        GcBarrier("job", at(9000), FOREVER, 7),
        GcBarrier("job", at(8000), 60, 8),
        GcBarrier("audit", at(7200), 600, None),
    )
    status = GcStatus(at(7200), (service("tikv-br-sync-a", 60),), at(7200), has_barriers=True, barriers=barriers)
    found = report(status, compose(NOW * 1000))
    assert [(each.service, str(each.owner), each.ttl) for each in found.services] == [
        ("job", "keyspace 7: a barrier of its own GC", None),
        ("job", "keyspace 8: a barrier of its own GC", 60),
        ("audit", "all keyspaces: a global GC barrier", 600),
        ("tikv-br-sync-a", "sync, changefeed or log a", 300),
    ]
    assert found.holder == found.services[2]
    assert found.held_seconds == 0
    write_metrics(tmp_path / "gc.prom", found, None)
    reported = samples(tmp_path / "gc.prom")
    assert reported['tikv_br_gc_service_holds_back{kind="global_barrier",service="audit"}'] == 1
    assert reported['tikv_br_gc_service_holds_back{kind="keyspace_barrier",service="7/job"}'] == 0
    assert reported['tikv_br_gc_service_holds_back{kind="keyspace_barrier",service="8/job"}'] == 0


def samples(path: Path) -> dict[str, float]:
    """The figures of the file."""
    return {name: float(value) for name, value in re.findall(r"^(tikv\S+) (\S+)$", path.read_text(), re.MULTILINE)}


def test_figures_for_prometheus(tmp_path: Path) -> None:
    """The file has times in seconds, the holder, and counters; nothing else is left in the folder."""
    path = tmp_path / "gc.prom"
    found = made(service("old", 7200), service("young", 5), gc=at(7200), worker=at(600))
    write_metrics(path, found, WorkerFigures(revision=9, rounds=3, failures=1))
    reported = samples(path)
    assert reported["tikv_br_gc_status_timestamp_seconds"] == NOW
    assert reported["tikv_br_gc_safe_point_timestamp_seconds"] == NOW - 7200
    assert reported["tikv_br_gc_worker_timestamp_seconds"] == NOW - 600
    assert reported["tikv_br_gc_held_back_seconds"] == 6600
    assert reported['tikv_br_gc_service_holds_back{kind="other",service="old"}'] == 1
    assert reported['tikv_br_gc_service_holds_back{kind="other",service="young"}'] == 0
    assert reported['tikv_br_gc_service_timestamp_seconds{kind="other",service="young"}'] == NOW - 5
    assert reported["tikv_br_gc_leader"] == 1
    assert (reported["tikv_br_gc_rounds_total"], reported["tikv_br_gc_failures_total"]) == (3, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["gc.prom"]
    write_metrics(path, None, WorkerFigures())
    assert set(samples(path)) == {"tikv_br_gc_leader", "tikv_br_gc_rounds_total", "tikv_br_gc_failures_total"}


def test_documented_metrics(tmp_path: Path) -> None:
    """docs/gc.md names each metric with its kind."""
    path = tmp_path / "gc.prom"
    write_metrics(path, made(service("old", 7200)), WorkerFigures())
    reported = set(re.findall(r"^# TYPE (tikv_br_\w+) (\w+)$", path.read_text(), re.MULTILINE))
    assert set(re.findall(r"^\| `(tikv_br_\w+)[^`]*` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)) == reported


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The flag is named, and what to do."""
    with pytest.raises(UsageError, match=r"--metrics-file .*No such file"):
        write_metrics(tmp_path / "none" / "gc.prom", None, None)
