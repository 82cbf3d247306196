"""The classic accident: rows of an API V2 cluster are deleted, and the backup is to bring them back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, Done, environment, succeed, tikv_br
from tests.integration.backup.data import load
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.errors import ChecksumMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = {b"key%03d" % number: b"value %d" % number for number in range(500)}
FILES = 5


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with `ROWS` in `FILES` regions."""
    codec = KeyCodec(ApiVersion.V2)
    with live_cluster(tmp_path_factory.mktemp("origin"), ApiVersion.V2, stores=3) as cluster:
        load(cluster, ROWS)
        cuts = [codec.bound(codec.rpc_key(b"key%03d" % (number * 100))) for number in range(1, FILES)]
        cluster.split(*cuts)
        yield cluster


@pytest.fixture(scope="module")
def before_the_accident(origin: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its backup."""
    folder = tmp_path_factory.mktemp("undo") / "backup"
    succeed("backup", "raw", "--pd", origin.pd, "--storage", f"local://{folder}")
    return folder


@pytest.fixture
def backup(before_the_accident: Path, tmp_path: Path) -> str:
    """A copy of it for each test: a restore that fails leaves its checkpoint there, which the next one would resume."""
    return f"local://{shutil.copytree(before_the_accident, tmp_path / 'backup')}"


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A recovery cluster."""
    with live_cluster(tmp_path_factory.mktemp("second"), ApiVersion.V2, stores=3) as cluster:
        yield cluster


@pytest.fixture
def live(origin: LiveCluster, backup: str) -> LiveCluster:
    """The cluster that was backed up, after the accident: each row was deleted."""
    return delete_rows(origin)


@pytest.fixture
def other(second: LiveCluster) -> LiveCluster:
    """A cluster that held the rows before, each of which was deleted."""
    second.cluster.flush_timestamps()  # deletes by timestamps of this moment, not of seconds ago
    return delete_rows(second)


def delete_rows(cluster: LiveCluster) -> LiveCluster:
    """Put all rows, and delete them by RawDelete and RawBatchDelete, which leave tombstones."""
    cluster.raw().delete_range(EVERY_KEY)
    load(cluster, ROWS)
    keys = sorted(ROWS)
    for key in keys[:20]:
        cluster.raw().delete(key)
    cluster.raw().batch_delete(keys[20:])
    assert contents(cluster) == {}
    return cluster


def restore(live: LiveCluster, backup: str, *flags: str) -> Done:
    """`tikv-br restore raw`, as JSON."""
    return tikv_br("restore", "raw", "--pd", live.pd, "--storage", backup, *flags, "--output", "json")


def timestamps(live: LiveCluster, folder: Path) -> set[int]:
    """Smallest and largest timestamp of each file of a backup by the stores."""
    place = f"local://{folder}"
    succeed("backup", "raw", "--pd", live.pd, "--storage", place, "--engine", "store", "--safe-interval", "0s")
    files = BackupSet.open(open_store(parse(place))).files
    return {ts for file in files for ts in (file.min_ts, file.max_ts)}


@pytest.mark.parametrize("flags", [(), ("--via", "upload"), ("--restamp",), ("--restamp", "always")])
def test_deleted_rows_come_back(live: LiveCluster, backup: str, flags: tuple[str, ...]) -> None:
    """By the plain command; what clients write right afterwards is visible."""
    done = restore(live, backup, *flags)
    live.raw().put(b"key000", b"new")
    live.raw().delete(b"key001")
    assert (done.code, done.last["verified"]) == (0, True), done.out
    assert done.last["restamp_ts"] > 0
    assert contents(live) == {key: value for key, value in ROWS.items() if key != b"key001"} | {b"key000": b"new"}


def test_rows_of_a_deleted_range_come_back(live: LiveCluster, backup: str) -> None:
    """RawDeleteRange leaves no tombstones: the same command."""
    live.raw().delete_range(EVERY_KEY)
    assert restore(live, backup).code == 0
    assert contents(live) == ROWS


def test_never_says_in_plain_words_that_deletes_hide_the_rows(live: LiveCluster, backup: str) -> None:
    """It fails as a comparison that finds a difference, and names the way out, which works."""
    done = restore(live, backup, "--restamp", "never")
    assert done.code == ChecksumMismatch.exit_code
    assert "newer deletes of the same keys in the target hide 500 restored rows" in done.last["message"]
    assert "--restamp auto" in done.last["hint"]
    assert contents(live) == {}
    assert restore(live, backup, "--restamp", "auto").code == 0
    assert contents(live) == ROWS


def test_always_gives_every_row_the_new_timestamp(backup: str, tmp_path: Path) -> None:
    """Also in a cluster that never held the rows; the default leaves them their own there."""
    files = BackupSet.open(open_store(parse(backup))).files
    own = {ts for file in files for ts in (file.min_ts, file.max_ts)}
    for number, flags in enumerate([("--restamp",), ("--restamp=always",), ()]):
        with live_cluster(tmp_path / f"fresh-{number}", ApiVersion.V2) as fresh:
            done = restore(fresh, backup, *flags)
            assert done.code == 0, done.out
            assert contents(fresh) == ROWS
            expected = {done.last["restamp_ts"]} if flags else own
            assert timestamps(fresh, tmp_path / f"again-{number}") == expected
            assert (done.last["restamp_ts"] > 0) is bool(flags)


@pytest.mark.parametrize("flags", [(), ("--via", "upload"), ("--ratelimit", "100")])
def test_hidden_rows_of_another_cluster_are_ingested_again(
    other: LiveCluster, backup: str, flags: tuple[str, ...]
) -> None:
    """The comparison finds them; what was ingested twice is reported, with the timestamp."""
    kept = min(ROWS)
    done = restore(other, backup, *flags)
    other.raw().put(kept, b"new")
    assert done.code == 0, done.out
    assert done.last["restamp_ts"] > 0
    assert done.last["regions"] == FILES
    notices = [line["message"] for line in done.lines if line["message_type"] == "notice"]
    assert any("newer deletes" in notice and "500 restored rows" in notice for notice in notices), done.out
    assert contents(other) == ROWS | {kept: b"new"}


def test_a_killed_restore_brings_back_what_was_deleted_meanwhile(live: LiveCluster, backup: str) -> None:
    """SIGKILL in the middle, the script deletes again, the same command again."""
    live.fail("Ingest", {"delay": {"seconds": 1.5}}, count=-1)  # of each file: time to notice the first before the last
    flags = ("--pd", live.pd, "--storage", backup, "--concurrency", "1")
    with subprocess.Popen([str(PROGRAM), "restore", "raw", *flags], env=environment(), cwd="/") as process:
        eventually(lambda: 0 < len(contents(live)) < len(ROWS), 180)
        os.kill(process.pid, signal.SIGKILL)
    live.heal()
    assert 0 < len(contents(live)) < len(ROWS)
    live.raw().batch_delete(contents(live))
    done = restore(live, backup)
    assert done.code == 0, done.out
    assert done.last["restamp_ts"] > 0
    assert contents(live) == ROWS


@pytest.mark.parametrize("flags", [("--restamp", "sometimes"), ("--restamp=",), ("--mode", "put", "--restamp")])
def test_a_wrong_value_is_a_usage_error(live: LiveCluster, backup: str, flags: tuple[str, ...]) -> None:
    """As of any other flag; rows that are put have new timestamps anyway."""
    done = restore(live, backup, *flags)
    assert done.code == UsageError.exit_code
    assert "restamp" in done.last["message"]
