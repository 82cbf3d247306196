"""A drill of each scenario that fails, and its report as a browser shows it: what went wrong stands first, and nothing looks like a success."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import load
from tests.integration.drill.conftest import ROWS, assert_nothing_left
from tests.support.browser import Page
from tests.support.live_cluster import live_cluster
from tikv_br.drill.history import read_past_drills, read_report
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.run import drill
from tikv_br.errors import BackupDamaged, DamageNotFound, HandOverNotRefused, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store


def fail(options: DrillOptions, expected: type[TikvBrError], page: Page) -> str:
    """Run a drill that fails, and return what a reader of its report sees."""
    with pytest.raises(expected) as caught:
        drill(options)
    assert_nothing_left(options)
    newest = max((Path(options.home.path) / "reports").glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    page.go(newest.as_uri())
    page.wait("document.readyState === 'complete'")
    assert page.complaints == []
    assert page.value("document.querySelectorAll('script').length") == 0
    text = page.text()
    assert "Recovery drill against an emulator: failed" in text
    assert text.index(caught.value.message) < text.index("Timeline")
    assert f"{expected.__name__}, exit code {expected.exit_code}" in text
    assert page.value("document.querySelectorAll('[data-plot=timeline] .broken').length") >= 1
    assert page.value("document.querySelectorAll('[data-plot=map] rect').length") >= 1
    return text


def damage(options: DrillOptions) -> None:
    """Make a backup, and damage one file of it."""
    report = drill(options)
    victim = min((Path(options.backups.path) / f"drill-{report.id}").rglob("*.sst"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")


def test_a_damaged_backup_fails_the_recovery_of_a_cluster_and_of_a_range(options: DrillOptions, page: Page) -> None:
    """Neither scenario restores it, and both reports name the step."""
    damage(options)
    newest = replace(options, backup=None)
    text = fail(newest, BackupDamaged, page)
    assert "Trend over the last 2 drills" in text
    assert "marks a drill that did not measure it." in text
    failed = read_report(open_store(options.home), read_past_drills(open_store(options.home))[-1].id)
    assert failed is not None
    assert (failed["trouble"]["exit_code"], failed["trouble"]["step"]) == (32, "restore")
    assert [phase["ended_well"] for phase in failed["phases"] if not phase["inside"]].count(False) == 1
    text = fail(
        replace(newest, scenario=Scenario.DELETED_RANGE, span=KeyRange(b"row00100", b"row00300")), BackupDamaged, page
    )
    assert "A range of keys was deleted" in text
    assert "in the step “restore everything”" in text


def test_damage_that_is_not_found_fails(options: DrillOptions, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """If verify found no damage, the report would state it."""
    monkeypatch.setattr("tikv_br.drill.damage.verify", lambda *_: None)
    text = fail(replace(options, scenario=Scenario.CORRUPT_BACKUP), DamageNotFound, page)
    assert "verify reports no damage" in text
    assert "Nothing was compared." in text


def test_a_sync_that_is_not_refused_fails(
    options: DrillOptions, page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a safe point were granted although GC should have passed it, the report would state it."""
    monkeypatch.setattr("tikv_br.drill.damage.advance_gc", lambda _context: None)
    assert options.backup is not None
    with live_cluster(tmp_path / "v2", ApiVersion.V2, stores=1) as live:
        load(live, ROWS)
        source = structs.replace(options.backup, cluster=live.config, safe_interval=0.0)
        text = fail(replace(options, backup=source, scenario=Scenario.STALE_SAFE_POINT), HandOverNotRefused, page)
    assert "a sync from it would still start" in text
