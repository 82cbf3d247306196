from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import load
from tests.integration.drill.conftest import ROWS, assert_nothing_left
from tests.support.live_cluster import contents, live_cluster
from tikv_br.backupset import lease
from tikv_br.drill.history import read_past_drills, read_report
from tikv_br.drill.objectives import Objectives
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.run import drill
from tikv_br.drill.targets import Destination
from tikv_br.errors import LeaseHeld, StorageError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event
from tikv_br.report.facts import DrillVerdict
from tikv_br.report.hooks import Hooks
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.open import open_store


@pytest.mark.core("drill", "report")
def test_a_lost_cluster_is_recovered_on_a_playground(options: DrillOptions) -> None:
    """All keys come back and are proven, the figures are measured, and what the drill made is gone but for the backup."""
    report = drill(replace(options, objectives=Objectives(rpo=3600, rto=3600, max_age=3600, min_keys=len(ROWS))))
    assert report.verdict is DrillVerdict.PASSED
    assert report.value("keys") == len(ROWS)
    assert 0 < (report.value("RTO") or 0) < report.seconds
    assert [phase.name for phase in report.phases if not phase.inside][-1] == "clean up"
    assert sum(cell.keys for cell in report.keyspace_map) == len(ROWS)
    assert_nothing_left(options)

    again = drill(replace(options, backup=None))
    assert again.backup is not None
    assert report.backup is not None
    assert again.backup.id == report.backup.id
    assert not again.backup.made_by_drill
    assert [past.id for past in read_past_drills(open_store(options.home))] == [report.id, again.id]


def test_hooks_that_fail_change_nothing_but_what_is_told(
    options: DrillOptions, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The drill passes; log and report have the errors, and no output has a URL."""
    secret = "a-path-that-is-secret"
    url = SecretText(f"http://127.0.0.1:1/{secret}")
    hooks = Hooks(url, url, command=("false", secret))
    seen: list[Event] = []
    report = drill(replace(options, hooks=hooks), seen.append)
    assert report.verdict is DrillVerdict.PASSED
    kept = read_report(open_store(options.home), report.id)
    assert kept is not None
    reported = [notice for notice in kept["notices"] if " failed: " in notice]
    assert [notice.partition(" failed")[0] for notice in reported] == ["the webhook", "the heartbeat", "the command"]
    assert all(problem in caplog.text for problem in reported)
    assert secret not in caplog.text + str(seen)
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in left if secret.encode() in data]
    assert any(b"the webhook failed" in data and b"<html" in data for data in left)


def test_hooks_hear_of_a_drill_whose_report_cannot_be_written(options: DrillOptions, tmp_path: Path) -> None:
    """The exit code is that of the storage, and the hooks report it."""
    (tmp_path / "drills").mkdir()
    (tmp_path / "drills" / "reports").write_text("a file, where a folder belongs")
    script = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'reported')!r}, 'w'))"
    hooks = Hooks(textfile=str(tmp_path / "drill.prom"), command=(sys.executable, "-c", script))
    with pytest.raises(StorageError) as caught:
        drill(replace(options, hooks=hooks))
    reported = json.loads((tmp_path / "reported").read_text())
    assert (reported["TIKV_BR_DRILL_VERDICT"], reported["TIKV_BR_DRILL_PAGE"]) == ("failed", "")
    assert reported["TIKV_BR_DRILL_EXIT_CODE"] == str(caught.value.exit_code)
    assert 'tikv_br_drill_success{scenario="lost-cluster"} 0.0' in (tmp_path / "drill.prom").read_text()


def test_a_deleted_range_is_restored_alone(options: DrillOptions) -> None:
    """The target has lost a range and gets it back, and equals the backup again."""
    report = drill(replace(options, scenario=Scenario.DELETED_RANGE, span=KeyRange(b"row00100", b"row00300")))
    assert report.verdict is DrillVerdict.PASSED
    assert report.value("keys") == len(ROWS)
    assert report.trend[-1].speed is None  # the time is that of a part
    assert (report.compared[0].keys, report.compared[0].how.partition(";")[0]) == (200, "from row00100 to row00300")
    assert_nothing_left(options)


@pytest.mark.parametrize("end", [b"row00004", b"row00001", b"row00000"])
def test_a_range_is_deleted_row_by_row_and_as_a_range(tmp_path: Path, end: bytes) -> None:
    """In API V2 the first half leaves tombstones, which hide what is restored with older timestamps, and the rest none."""
    rows = {b"row%05d" % number: b"x" for number in range(6)}
    with live_cluster(tmp_path / "target", ApiVersion.V2) as live:
        live.raw().batch_put(rows)
        codec = KeyCodec(ApiVersion.V2)
        Destination(live.config, ApiVersion.V2, (codec.rpc_range(),)).delete(KeyRange(b"row00000", end))
        deleted = [key for key in rows if key < end]
        assert contents(live) == {key: rows[key] for key in rows if key >= end}
        tombstones = [key for key in rows if live.raw().has_tombstone(key)]
    assert tombstones == deleted[: (len(deleted) + 1) // 2]


def test_a_range_without_a_key_proves_nothing(options: DrillOptions) -> None:
    """Nothing was deleted and nothing restored: that is no recovery that worked."""
    with pytest.raises(UsageError, match="no key between"):
        drill(replace(options, scenario=Scenario.DELETED_RANGE, span=KeyRange(b"row00100a", b"row00100b")))
    assert_nothing_left(options)


def test_damage_to_a_copy_is_found_by_verify_and_restore(options: DrillOptions) -> None:
    """The scenario passes, names the damaged file, and leaves neither the copy nor a changed backup."""
    report = drill(replace(options, scenario=Scenario.CORRUPT_BACKUP, seed=5))
    assert report.verdict is DrillVerdict.PASSED
    assert [each.what for each in report.compared] == ["verify of the damaged copy", "restore of the damaged copy"]
    assert_nothing_left(options)
    assert drill(replace(options, backup=None)).verdict is DrillVerdict.PASSED


def test_two_drills_do_not_run_at_once(options: DrillOptions) -> None:
    """The second is refused while the first holds the home, and leaves nothing there."""
    with lease.acquire(open_store(options.home), "drill"), pytest.raises(LeaseHeld) as refused:
        drill(options)
    assert "--lock-wait" not in refused.value.hint
    assert_nothing_left(options)


def test_a_sync_from_a_backup_that_gc_has_passed_is_refused(options: DrillOptions, tmp_path: Path) -> None:
    """A V2 backup: once GC is past it, nobody can begin there. One of a V1 source has no timestamp to begin at."""
    stale = replace(options, scenario=Scenario.STALE_SAFE_POINT)
    with pytest.raises(UsageError, match="no backup-ts"):
        drill(stale)
    assert options.backup is not None
    with live_cluster(tmp_path / "v2", ApiVersion.V2, stores=1) as live:
        load(live, ROWS)
        report = drill(replace(stale, backup=structs.replace(options.backup, cluster=live.config, safe_interval=0.0)))
    assert report.verdict is DrillVerdict.PASSED
    assert [each.what for each in report.compared] == ["start of a sync after GC"]
    assert_nothing_left(options)
