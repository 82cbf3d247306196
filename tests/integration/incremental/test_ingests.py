"""Followers of a cluster into which rows are ingested, which no running change feed delivers."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.feed_state import FeedState
from tests.integration.incremental.writer import Writer
from tests.support.live_cluster import LiveCluster, contents
from tests.support.waiting import eventually
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import status_of
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.ingest_announcer import Announcer
from tikv_br.cluster.ingests import Follower, Ingest
from tikv_br.cluster.marks import Mark, new_secret
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import compose, physical_ms
from tikv_br.errors import ClusterFollowed, ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.feed.feed import Feed
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.options import Mode, Restamp, RestoreOptions
from tikv_br.restore.record import RestoreCheckpoint, RestoreRecord
from tikv_br.restore.resume import marks_of
from tikv_br.restore.run import abort_restores, restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

V2 = ApiVersion.V2
ROWS = {b"key%04d" % at: b"backed up" for at in range(300)}
AFTER = {b"key%04d" % at: b"written later" for at in range(100, 300)}


@pytest.fixture
def source(clusters: Clusters) -> LiveCluster:
    """An empty cluster that nobody follows."""
    live = clusters(V2)
    live.raw().delete_range(EVERY_KEY)
    return live


def back_up(live: LiveCluster, folder: Path, *more: str) -> str:
    """A backup of all rows; its URL."""
    place = f"local://{folder}"
    quick = ["--executor", "driver", "--safe-interval", "0s"]
    succeed("backup", "raw", "--pd", live.pd, "--storage", place, *quick, *more)
    return place


def damaged(live: LiveCluster, folder: Path) -> str:
    """A cluster that has lost a third of its rows, and overwritten the others, since its backup; the backup's URL."""
    live.raw().batch_put(ROWS)
    place = back_up(live, folder)
    live.raw().batch_put(AFTER)
    for key in list(ROWS)[:100]:
        live.raw().delete(key)
    return place


def undo(
    live: LiveCluster, place: str, restamp: Restamp = Restamp.AUTO, reporter: Reporter = silent, **changes: object
) -> None:
    """Restore it over the current rows."""
    options = RestoreOptions(live.config, parse(place), allow_overwrite=True, restamp=restamp)
    restore(structs.replace(options, **changes), reporter)


def commands(live: LiveCluster) -> list[str]:
    """The commands that have announced ingests, the oldest first."""
    return [each.command for each in sorted(live.cluster.ingests.read(), key=lambda each: each.announced_ts)]


@contextlib.contextmanager
def feeding(live: LiveCluster) -> Iterator[Feed]:
    """A feed from now on, without hold-back."""
    codec, start = live.raw().codec, live.cluster.pd.tso()
    live.cluster.flush_timestamps()
    span = codec.rpc_range()
    options = FeedOptions(hold_back=0.0)
    with Feed(live.cluster, codec, span, start, options, ingests=live.cluster.watched_ingests) as feed:
        yield feed


@pytest.mark.slow
def test_ingested_rows_with_new_timestamps_are_delivered_in_order(source: LiveCluster, tmp_path: Path) -> None:
    """A running feed delivers the rows of a restore, before any resolved-ts that covers them, while clients write."""
    source.raw().batch_put(ROWS)
    place = back_up(source, tmp_path / "backup")
    with feeding(source) as feed, Writer(source, 1):
        progress = FeedState(feed)
        source.raw().batch_put({**ROWS, **AFTER})
        for key in list(ROWS)[:100]:
            source.raw().delete(key)
        progress.until(source.cluster.pd.tso())
        restoring = threading.Thread(target=undo, args=(source, place))
        restoring.start()
        while restoring.is_alive():
            progress.take(0.05)
        restoring.join()
        ended = source.cluster.pd.tso()
        progress.until(ended)
        assert {key: progress.state.get(key) for key in ROWS} == ROWS
    assert {key: value for key, value in contents(source).items() if key in ROWS} == ROWS


def test_no_resolved_ts_is_within_an_ingest(source: LiveCluster) -> None:
    """A follower that starts between its lowest timestamp and its end would take rows that it has for missed ones."""
    cluster = source.cluster
    now = cluster.pd.tso()
    cluster.ingests.save(Ingest("within", "restore raw", (KeyRange(b"", b""),), now))
    with feeding(source) as feed:
        progress = FeedState(feed)
        progress.wait(lambda: "within" in feed.status.waits_for)
        lowest = cluster.pd.tso()
        ended = compose(physical_ms(lowest) + 3000)  # resolved-ts takes three seconds to get there
        cluster.ingests.save(Ingest("within", "restore raw", (KeyRange(b"", b""),), now, lowest, ended))
        progress.wait(lambda: progress.resolved >= lowest)
        assert progress.resolved >= ended
        assert not progress.missed


def test_an_ingest_is_announced_before_its_first_file_and_after_its_last(
    source: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its command, its range and the lowest timestamp of its rows; the end is announced once all are in."""
    place = damaged(source, tmp_path / "backup")
    known = {each.id for each in source.cluster.ingests.read()}
    seen: list[list[Ingest]] = []
    ingest = StoreClient.ingest

    def announced() -> list[Ingest]:
        return [each for each in source.cluster.ingests.read() if each.id not in known]

    def watched(self: StoreClient, request: Any) -> Any:  # noqa: ANN401
        seen.append(announced())
        done = ingest(self, request)
        seen.append(announced())
        return done

    monkeypatch.setattr(StoreClient, "ingest", watched)
    before = source.cluster.pd.tso()
    undo(source, place)
    assert seen
    for [each] in seen:
        assert each.command == "restore raw"
        assert each.ranges == (source.raw().codec.rpc_range(),)
        assert (each.lowest_ts or 0) > each.announced_ts > before
        assert not each.finished_ts
    [ended] = announced()
    assert ended == structs.replace(seen[-1][0], finished_ts=ended.finished_ts)
    assert ended.finished_ts > (ended.lowest_ts or 0)
    undo(source, place, Restamp.NEVER)
    assert [each.lowest_ts for each in announced() if each != ended] == [0]


@pytest.mark.slow
def test_a_feed_waits_for_an_unfinished_ingest(source: LiveCluster) -> None:
    """After a kill in the middle no resolved-ts passes the new timestamp until the announcement is finished."""
    span = source.raw().codec.rpc_range()
    with feeding(source) as feed:
        progress = FeedState(feed)
        progress.until(source.cluster.pd.tso())
        killed = Announcer.start(source.cluster, "restore raw", "0123", [span])
        killed.begin(new := source.cluster.pd.tso())
        killed.close()
        for _ in range(20):
            progress.take(0.1)
        assert progress.resolved < new
        assert "restore raw" in feed.status.waits_for
        resumed = Announcer.start(source.cluster, "restore raw", "0123", [span])
        assert resumed.found_unfinished
        resumed.finish()
        progress.until(source.cluster.pd.tso())
        assert not feed.status.waits_for


def test_a_later_ingest_finishes_the_announcement_of_a_killed_one(source: LiveCluster) -> None:
    """The announcement of a command that is gone is finished by the next ingest, that of a running one is not."""
    span = source.raw().codec.rpc_range()
    ingests = source.cluster.ingests
    gone, running, later = (
        Announcer.start(source.cluster, "restore raw", name, [span]) for name in ("gone", "running", "later")
    )
    try:
        for each in (gone, running, later):
            each.begin(source.cluster.pd.tso())
        gone.close()
        later.finish()
        found = {each.id: each for each in ingests.read()}
        assert found[gone.ingest.id].finished_ts > 0
        assert found[running.ingest.id].finished_ts == 0
    finally:
        running.finish()


def test_an_abort_finishes_the_announcement_of_a_killed_restore(source: LiveCluster, tmp_path: Path) -> None:
    """If there are followers, it waits for the end of the lease, until which stores may execute the last requests; then they go on."""
    source.cluster.pd.update_service_safe_point("tikv-br-sync-abort", 60, source.cluster.pd.tso())
    source.cluster.ingests.register_follower("tikv-br-sync-abort", Follower("s", has_ended=True))
    span, place = source.raw().codec.rpc_range(), parse(f"local://{tmp_path}")
    secret = new_secret()
    marks_of(source.cluster).save("0123456789abcdef", Mark(secret, ()))
    RestoreRecord(open_store(place), "0123456789abcdef").create_checkpoint(RestoreCheckpoint(0, (), 0, secret=secret))
    killed = Announcer.start(source.cluster, "restore raw", "0123456789abcdef", [span])
    killed.begin(source.cluster.pd.tso())
    end_of_lease = threading.Timer(1.0, killed.close)
    end_of_lease.start()
    assert abort_restores(place, source.config).forgotten_restores == 1
    end_of_lease.join()
    source.cluster.pd.update_service_safe_point("tikv-br-sync-abort", 0, 0)
    assert [each.finished_ts > 0 for each in source.cluster.ingests.read() if each.id == killed.ingest.id] == [True]


@pytest.mark.slow
def test_rows_that_keep_their_timestamps_are_reported(source: LiveCluster, clusters: Clusters, tmp_path: Path) -> None:
    """The feed reports range and times of the missed rows; the resolved-ts advances after that."""
    place = damaged(source, tmp_path / "backup")
    source.raw().delete_range(EVERY_KEY)
    with feeding(source) as feed:
        progress = FeedState(feed)
        progress.until(before := source.cluster.pd.tso())
        undo(source, place, Restamp.NEVER)
        progress.until(source.cluster.pd.tso())
    [found] = progress.missed
    assert before <= found.from_ts < found.to_ts
    assert "restore raw" in found.cause
    assert contents(source) == ROWS


@pytest.mark.slow
def test_a_restore_stops_when_a_follower_would_not_notice(source: LiveCluster, tmp_path: Path) -> None:
    """TiKV-CDC and a sync of an older version are named before anything changes; `--allow-followers` goes on, and so do puts."""
    place = damaged(source, tmp_path / "backup")
    before = contents(source)
    with Etcd.connect([source.pd]) as etcd:
        etcd.put("/tikv/cdc/changefeed/info/repl-1", json.dumps({"state": "normal"}).encode())
        etcd.put("/tikv/cdc/changefeed/info/over", json.dumps({"state": "finished"}).encode())
        source.cluster.pd.update_service_safe_point("tikv-br-sync-old", 60, source.cluster.pd.tso())
        try:
            with pytest.raises(ClusterFollowed, match=r"tikv-br-sync-old.*repl-1") as caught:
                undo(source, place)
            assert "over" not in caught.value.message.split("not notice: ")[1]
            assert contents(source) == before
            done = tikv_br("restore", "raw", "--pd", source.pd, "--storage", place, "--allow-overwrite")
            assert done.code == 16
            said: list[str] = []
            undo(source, place, reporter=lambda each: said.append(str(each)), mode=Mode.PUT)
            assert any("get these rows, as they are put" in each and "repl-1 of TiKV-CDC" in each for each in said)
            source.raw().batch_put(AFTER)
            undo(source, place, allow_followers=True)
        finally:
            etcd.delete("/tikv/cdc/", prefix=True)
            source.cluster.pd.update_service_safe_point("tikv-br-sync-old", 0, 0)
    assert contents(source) == ROWS


def test_a_changefeed_that_was_removed(source: LiveCluster, tmp_path: Path) -> None:
    """The safe point that it left is named with its expiry, and the hint's command removes it: then the restore goes on."""
    place = damaged(source, tmp_path / "backup")
    source.cluster.pd.update_service_safe_point("tikvcdc", 3600, source.cluster.pd.tso())
    with pytest.raises(
        ClusterFollowed, match=r"\(safe point tikvcdc, which expires at 20..-..-.. ..:..:.. UTC unless"
    ) as caught:
        undo(source, place)
    assert "`tikv-br gc release SERVICE` removes it at once" in caught.value.hint
    assert tikv_br("gc", "release", "tikvcdc", "--pd", source.pd, "--yes", "--watch", "0s").code == 0
    undo(source, place)
    assert contents(source) == ROWS


def test_followers_that_will_end_degraded_are_named(source: LiveCluster, tmp_path: Path) -> None:
    """Only where rows keep their timestamps, and only followers whose safe point is alive."""
    place, pd = damaged(source, tmp_path / "backup"), source.cluster.pd
    ingests = source.cluster.ingests
    for name in ("mine", "gone"):
        ingests.register_follower(f"tikv-br-sync-{name}", Follower("s", has_ended=True))
    pd.update_service_safe_point("tikv-br-sync-mine", 3600, pd.tso())
    said: list[str] = []
    try:
        undo(source, place, reporter=lambda each: said.append(str(each)))
        assert not any("degraded" in each for each in said)
        source.raw().delete_range(EVERY_KEY)
        undo(source, place, Restamp.NEVER, reporter=lambda each: said.append(str(each)))
        (warning,) = (each for each in said if "degraded" in each)
        named = re.search(r"will end degraded \(exit code 76\): ([\w, -]+)\. With --restamp always", warning)
        assert named is not None, warning
        assert "mine" in named[1].split(", ")  # beside those of earlier tests, whose safe points still live
        assert "gone" not in named[1].split(", ")
    finally:
        pd.update_service_safe_point("tikv-br-sync-mine", 0, 0)


@pytest.mark.slow
def test_an_incremental_backup_refuses_rows_that_keep_their_timestamps(source: LiveCluster, tmp_path: Path) -> None:
    """After a restore with new timestamps the chain continues with its rows; after one that keeps them it is refused."""
    place = damaged(source, tmp_path / "backup")
    undo(source, place)
    base = ["--base", place]
    second = back_up(source, tmp_path / "second", *base)
    source.raw().delete_range(EVERY_KEY)
    undo(source, place, Restamp.NEVER)
    done = tikv_br(
        *("backup", "raw", "--pd", source.pd, "--storage", f"local://{tmp_path / 'third'}", "--base", second),
        *("--executor", "driver", "--safe-interval", "0s"),
    )
    assert (done.code, "older timestamps" in done.err) == (ClusterUnfit.exit_code, True)


@pytest.fixture(scope="module")
def target(targets: Clusters) -> LiveCluster:
    """Target of changes."""
    return targets(V2)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until the end of the block."""
    pipe = subprocess.PIPE
    command = [str(PROGRAM), *arguments]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_sync_copies_what_is_restored_into_its_source(
    source: LiveCluster, target: LiveCluster, tmp_path: Path
) -> None:
    """A sync copies rows restored into its source; if they keep their timestamps it reports that, and ends with 76."""
    target.raw().delete_range(EVERY_KEY)
    place = damaged(source, tmp_path / "backup")
    quick = ["--hold-back", "0s", "--status-every", "1s", "--output", "json", "--id", "ingests", "--start-ts", "now"]
    target.raw().batch_put(contents(source))
    state = ["--state-dir", str(tmp_path / "state")]
    with running("sync", "--pd", source.pd, "--sink", f"tikv://{target.pd}", *state, *quick) as process:
        eventually(lambda: "tikv-br-sync-ingests" in source.cluster.ingests.followers())
        undo(source, place)
        assert contents(source) == ROWS
        eventually(lambda: contents(target) == ROWS)
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(f'{{"key": "loaded-{at}", "value": "v"}}\n' for at in range(100)))
        columns = ["--key-column", "key", "--value-column", "value", "--staging", f"local://{tmp_path / 'staging'}"]
        succeed("load", "raw", "--pd", source.pd, "--input", str(rows), *columns, "--executor", "driver")
        assert commands(source)[-1] == "load raw"
        eventually(lambda: contents(target).keys() == ROWS.keys() | {b"loaded-%d" % at for at in range(100)})
        undo(source, place, Restamp.NEVER)
        source.raw().put(b"last", b"one")
        eventually(lambda: contents(target).get(b"last") == b"one")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 76, err
        missed = json.loads(out.splitlines()[-2])["missed"]
        assert "restore raw" in missed[-1]  # others may be of tests that ended right before the start-ts
    with running("sync", "--pd", source.pd, "--sink", f"tikv://{target.pd}", *state, *quick) as again:
        source.raw().put(b"later", b"one")
        eventually(lambda: contents(target).get(b"later") == b"one")
        again.send_signal(signal.SIGTERM)
        out, err = again.communicate(timeout=60)
        assert (again.returncode, json.loads(out.splitlines()[-2])["missed"]) == (76, missed), err


@pytest.mark.slow
def test_a_log_records_the_gap_that_an_ingest_leaves(source: LiveCluster, tmp_path: Path) -> None:
    """Rows with new timestamps are in the log; those that keep older ones are a gap, which no restore crosses."""
    place = damaged(source, tmp_path / "backup")
    archive = f"local://{tmp_path / 'log'}"
    quick = ["--hold-back", "0s", "--flush-interval", "300ms", "--from-backup", place]
    point = [
        "restore",
        "point",
        "--pd",
        source.pd,
        "--storage",
        archive,
        "--full-backup-storage",
        place,
        "--allow-overwrite",
        "--dry-run",
    ]
    with running("log", "start", "--pd", source.pd, "--storage", archive, *quick) as process:
        eventually(lambda: tikv_br("log", "status", "--storage", archive).code == 0)
        undo(source, place)
        between = source.cluster.pd.tso()

        def reached(ts: int) -> bool:
            shown = tikv_br("log", "status", "--storage", archive, "--output", "json")
            assert shown.lines, shown
            return bool(shown.lines[0]["checkpoint_ts"] >= ts)

        eventually(lambda: reached(between))
        undo(source, place, Restamp.NEVER)
        after = source.cluster.pd.tso()
        eventually(lambda: reached(after))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, "start another log from it" in err, "--repair" in err) == (76, True, False), err
    status = tikv_br("log", "status", "--storage", archive)
    assert (status.code, "ingested rows with older timestamps" in status.out) == (39, True)
    assert tikv_br(*point, "--until", str(between)).code == 0
    succeed(*point[:-1], "--until", str(between))
    assert commands(source)[-1] == "restore point"
    crossing = tikv_br(*point, "--until", str(after))
    assert (crossing.code, "older timestamps" in crossing.err) == (39, True), crossing.err
    merge = ["backup", "merge", "--base", place, "--log", archive, "--executor", "driver"]
    before = tikv_br(*merge, "-s", f"local://{tmp_path / 'before'}", "--until", str(between))
    assert before.code == 0, before.err
    beyond = tikv_br(*merge, "-s", f"local://{tmp_path / 'beyond'}", "--until", str(after))
    assert (beyond.code, "older timestamps" in beyond.err) == (39, True), beyond.err
    compacted = tikv_br("log", "compact", "--storage", archive, "--executor", "driver")
    assert (compacted.code, "older timestamps" in compacted.err) == (39, True), compacted.err
    [shown_by_serve] = status_of(LogArchive.open(open_store(parse(archive)), "default")).gaps
    assert "older timestamps" in shown_by_serve


def test_announcements_are_removed_once_gc_has_passed_them(source: LiveCluster) -> None:
    """An announcement stays as long as a follower may start before it."""
    ingests, pd = source.cluster.ingests, source.cluster.pd
    old, new = Ingest("old-1", "restore raw", (), 1, 2, 3), Ingest("new-1", "restore raw", (), 1, 2, pd.tso())
    for each in (old, new):
        ingests.save(each)
    ingests.clean_up(pd.tso(), gc_safe_point=4, live_services=ingests.followers())
    names = {each.id for each in ingests.read()}
    assert "old-1" not in names
    assert "new-1" in names
