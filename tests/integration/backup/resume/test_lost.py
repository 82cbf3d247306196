"""A run that loses its path or its safe point ends, and harms nothing that others go on with."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.conftest import Options
from tests.integration.backup.data import when
from tests.integration.backup.resume.unfinished import REGIONS, V2, fail_half_way, files_at, fill, is_whole
from tests.support.ledgers import read_entries
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset import lease, manifest
from tikv_br.cluster import safepoint as backup_ts_module
from tikv_br.cluster.safepoint import service_id
from tikv_br.errors import LeaseLost, SafePointError
from tikv_br.progress_events import Event, StepStarted, TasksProgress
from tikv_br.storage.open import open_store


@pytest.mark.parametrize("renew_every", [0.05, 1000.0], ids=["while it copies", "before it commits"])
def test_lost_lease_stops_the_run_and_leaves_all_to_the_next(
    renew_every: float, v2: LiveCluster, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the path is another's, the run removes nothing of it; the next goes on from there."""
    wanted = options(v2, concurrency=1)
    monkeypatch.setattr(lease, "acquire", functools.partial(lease.acquire, renew_every=renew_every))

    def break_it(event: Event) -> None:
        if isinstance(event, TasksProgress) and event.tasks_done >= 2:  # not every number is reported
            lease.break_lease(open_store(wanted.storage), force=True)

    v2.fail("RawScan", {"delay": {"seconds": 0.05}}, skip=REGIONS // 2, count=-1)
    with pytest.raises(LeaseLost, match="broken by `tikv-br backup unlock`") as raised:
        backup(wanted, break_it)
    assert "run the same command again" in raised.value.hint
    assert "backupmeta" not in files_at(wanted)
    done = read_entries(open_store(wanted.storage))
    assert len(done) >= 2
    v2.heal()
    monkeypatch.undo()
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done)
    is_whole(wanted, summary, v2, tmp_path)


def let_gc_pass(live: LiveCluster) -> None:
    """Have GC go on to this moment, and take the safe points of all services away, as time would.

    In this order, or a renewal in between would hold GC back again.
    """
    live.cluster.pd.update_service_safe_point("gc_worker", 2**63 - 1, live.cluster.pd.tso())
    for name in live.safe_points():
        live.cluster.pd.update_service_safe_point(name, 0, 0)


def test_gc_that_passes_fails_the_run(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it copies: nothing stays, for nothing could go on. Between two runs: that is said, with a way out."""
    monkeypatch.setattr(backup_ts_module, "MIN_TTL", 1)
    with live_cluster(tmp_path / "cluster", V2, stores=1) as live:
        fill(live)
        wanted = options(live, concurrency=1, safe_interval=0, gc_ttl=1)
        live.fail("RawScan", {"delay": {"seconds": 0.1}}, count=-1)
        with pytest.raises(SafePointError, match="has passed"):
            backup(wanted, when(StepStarted, "copy", lambda: let_gc_pass(live)))
        live.heal()
        assert files_at(wanted) == set()
        assert live.safe_points() == {}
        fail_half_way(live, wanted)
        let_gc_pass(live)
        with pytest.raises(SafePointError, match="has passed") as raised:
            backup(wanted)
        assert "--no-resume" in raised.value.hint
        assert read_entries(open_store(wanted.storage))
        summary = backup(structs.replace(wanted, no_resume=True)).summary
        is_whole(wanted, summary, live, tmp_path)


def test_lost_lease_leaves_the_safe_point_to_who_has_the_path(
    v2: LiveCluster, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the first interval is done: another run may go on with this one's, under the same safe point."""
    wanted = options(v2)
    monkeypatch.setattr(lease, "acquire", functools.partial(lease.acquire, renew_every=0.05))

    v2.fail("RawScan", {"delay": {"seconds": 0.1}}, count=-1)

    def take_it_away() -> None:
        lease.break_lease(open_store(wanted.storage), force=True)

    with pytest.raises(LeaseLost):
        backup(wanted, when(StepStarted, "copy", take_it_away))
    begun = manifest.read_run(open_store(wanted.storage))
    assert begun is not None
    assert v2.safe_points() == {service_id(begun.run_id, wanted.storage): begun.description.backup_ts - 1}
