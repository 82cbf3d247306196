"""Regions split, merge and move and stores die while stores write a backup: it ends whole and equal, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.backup.conftest import Options
from tests.integration.backup.data import hard_rows
from tests.integration.backup.moving import (
    READ_FIRST,
    SPLITS,
    healed_late,
    impatient,
    merge,
    moving_cluster,
    other_store,
    patient,
    region_at,
    split,
    spread_and_healed,
    transfer_leader,
)
from tests.integration.backup.reading import rocksdb_rows, stored
from tests.support.live_cluster import LiveCluster
from tikv_br.backup import store
from tikv_br.backup.run import backup
from tikv_br.errors import RequestRefused, RetryBudgetExhausted, TikvBrError
from tikv_br.formats.api_version import ApiVersion

POINT = "backup.region"


@pytest.fixture(scope="module")
def rows() -> dict[bytes, bytes]:
    """Return what the cluster holds."""
    return hard_rows(count=1000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, rows: dict[bytes, bytes]) -> Iterator[LiveCluster]:
    """Run the cluster."""
    with moving_cluster(tmp_path_factory.mktemp("moving"), rows) as live:
        yield live


@pytest.fixture
def live(cluster: LiveCluster) -> Iterator[LiveCluster]:
    """Return it as at first; what a test has broken is healed after it."""
    with spread_and_healed(cluster) as live:
        yield live


def check_equal(live: LiveCluster, options: Options, rows: dict[bytes, bytes], scratch: Path) -> None:
    """Back up as V2, compare with the rows, and check that no file remains that the backup does not name."""
    wanted = options(live, cluster=patient(live), dst_api_version=ApiVersion.V2, engine="store")
    summary = backup(wanted).summary
    place = Path(wanted.storage.path)
    expected = stored({key: (value, 0) for key, value in rows.items()}, ApiVersion.V2, ts=1)
    assert rocksdb_rows(place, scratch) == expected
    assert len(list(place.rglob("*.sst"))) == summary.files
    assert not [path for path in place.rglob("*") if path.is_dir() and not list(path.iterdir())]


@pytest.mark.parametrize("command", [split, merge, transfer_leader])
def test_a_region_that_moves_before_it_is_written(
    command: Callable[[LiveCluster], dict[str, Any]],
    live: LiveCluster,
    options: Options,
    rows: dict[bytes, bytes],
    tmp_path: Path,
) -> None:
    """The store has begun, and the region is no longer what it was: no row is lost or twice."""
    region = region_at(live, READ_FIRST)
    moving = live.fail(POINT, {"command": command(live)}, region_id=region["id"])
    check_equal(live, options, rows, tmp_path)
    assert live.hits(moving) == 1


def test_a_region_that_its_new_leader_writes_again(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """It is answered for by its old leader, moves, and is answered for by its new one: the newer file replaces the older."""
    mover = region_at(live, READ_FIRST)["leader_store"]
    region = region_at(live, SPLITS[0])
    assert region["leader_store"] != mover
    assert mover in {region_at(live, key)["leader_store"] for key in SPLITS[1:]}
    command = {"name": "transfer-leader", "arguments": {"region_id": region["id"], "store_id": mover}}
    live.fail("Backup", {"delay": {"seconds": 4}}, store_id=mover)  # until the other has written it
    moving = live.fail("Backup", {"command": command}, store_id=mover)
    written = live.fail(POINT, {"delay": {"seconds": 0}}, region_id=region["id"], count=-1)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(moving) == 1
    assert live.hits(written) == 2


@pytest.mark.parametrize(
    "error",
    [
        {"server_is_busy": {"reason": "timeout"}},
        {"epoch_not_match": {}},
        {"not_leader": {}},
        {"region_not_found": {}},
        {"stale_command": {}},
        {"message": "TiKV is Closing"},
    ],
    ids=lambda error: next(iter(error)),
)
def test_region_errors_that_pass(
    error: dict[str, Any], live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Two regions answer with an error and no range: exactly those are asked for again."""
    asked = live.fail(POINT, {"delay": {"seconds": 0}}, count=-1)
    failing = live.fail(POINT, {"region_error": error}, skip=2, count=2)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(failing) == 2
    assert live.hits(asked) == len(live.regions()) + 2


def test_a_region_error_that_no_retry_cures(live: LiveCluster, options: Options) -> None:
    """It ends the backup at once, and nothing stays."""
    live.fail(POINT, {"region_error": {"FlashbackInProgress": {}}}, count=-1)
    check_nothing_stays(live, options, RequestRefused)


def test_stores_that_stay_busy_with_a_region_exhaust_the_budget(live: LiveCluster, options: Options) -> None:
    """The error has the cause; nothing remains."""
    region = region_at(live, READ_FIRST)
    live.fail(POINT, {"region_error": {"not_leader": {}}}, region_id=region["id"], count=-1)
    check_nothing_stays(live, options, RetryBudgetExhausted, match="not_leader")


def test_stores_that_try_to_reach_the_storage_for_minutes(
    live: LiveCluster, options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A TiKV 8.5.6 without credentials answers nothing for more than ten minutes: a warning and the error name the likely cause."""
    monkeypatch.setattr(store, "LONG_FACTOR", 0.1)
    monkeypatch.setattr(store, "SILENT_SECONDS", 1.0)
    live.fail("Backup", {"delay": {"seconds": 3600}}, count=-1)
    wanted = options(live, cluster=impatient(live), engine="store")
    with pytest.raises(RetryBudgetExhausted, match=r"store \d+ \(127.0.0.1:\d+\): no answer for 3 s") as raised:
        backup(wanted)
    assert "its log shows these tries" in raised.value.hint
    assert "permission to write" in raised.value.hint
    assert "no store has answered for 1 s" in caplog.text


def check_nothing_stays(live: LiveCluster, options: Options, error: type[TikvBrError], match: str = "task") -> None:
    """Back up in vain."""
    wanted = options(live, cluster=impatient(live), engine="store")
    with pytest.raises(error, match=match):
        backup(wanted)
    assert not list(Path(wanted.storage.path).rglob("*"))


@pytest.mark.parametrize("rpc", ["Backup", POINT])
def test_a_connection_that_breaks(
    rpc: str, live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Before the first answer, or between two: what was answered counts, the rest is asked again."""
    failing = live.fail(rpc, {"drop": {}}, skip=1)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(failing) == 1


def test_a_store_that_dies_is_outlived(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """A store is killed between two regions; others take the lead, and the backup is whole."""
    mover = region_at(live, READ_FIRST)["leader_store"]
    killing = live.fail(POINT, {"kill_store": {}}, skip=1, store_id=mover)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(killing) == 1


def test_a_leader_that_pd_does_not_know_yet(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """The region moves before its store is asked, which skips it without a word: the gap is noticed."""
    region = region_at(live, SPLITS[1])
    arguments = {"region_id": region["id"], "store_id": other_store(live, region)}
    live.fail("Backup", {"delay": {"seconds": 1}}, store_id=region["leader_store"])
    moving = live.fail(
        "Backup", {"command": {"name": "transfer-leader", "arguments": arguments}}, store_id=region["leader_store"]
    )
    check_equal(live, options, rows, tmp_path)
    assert live.hits(moving) == 1


def test_a_cluster_that_comes_back_is_waited_for(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """All stores die and come back seconds later, within the budget of one call: the backup is whole."""
    killing = [live.fail(POINT, {"kill_store": {}}, store_id=store_id) for store_id in live.store_ids]
    with healed_late(live, killing):
        check_equal(live, options, rows, tmp_path)
