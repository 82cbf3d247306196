"""Times, logs and clusters of which no point in time can be restored: what is said of each, and that nothing has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.truth.conftest import World, check_failure, tikv_br
from tests.support.logs import write_log
from tikv_br.archive.maintenance import set_state
from tikv_br.archive.records import LogState
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cli.command import CommandPath
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

DAY = 86_400_000 << 18
TIMES: dict[CommandPath, str] = {
    ("restore", "raw", "--log"): "--until",
    ("restore", "point"): "--until",
    ("backup", "merge"): "--until",
}
"""Commands that take a time, and the flag."""
READERS: tuple[CommandPath, ...] = (*TIMES, ("show", "--log"))
NO_TIMES = ("the other day", "2026-11-22", "2026-11-22T14:61:00", "-1", "1e30", "18446744073709551616", "")


def refused(world: World, command: CommandPath, code: int, words: str, *more: str, **instead: str) -> None:
    """It ends with this code and says this; source, target, backups and log are as before, and no merged rows are left."""
    before, merged = world.picture(), set(world.folder.rglob("restore-*"))
    ended = world.call(command, *more, "--output", "json", **instead)
    check_failure(ended, code, f"{command} {more} {instead}", is_json=True)
    assert words in ended.last["message"] + ended.last["hint"], (command, more, instead, ended.last)
    assert world.picture() == before
    assert set(world.folder.rglob("restore-*")) == merged


@pytest.fixture(scope="module")
def backup_ts(world: World) -> int:
    """That of the sound backup."""
    return BackupSet.open(open_store(parse(f"local://{world.names['sound']}"))).backup_ts


@pytest.mark.parametrize("command", TIMES, ids=" ".join)
def test_times(world: World, backup_ts: int, command: CommandPath) -> None:
    """In the future, before the end of the backup's scan, and texts that are no times."""
    refused(world, command, 43, "is outside the restorable window", TIMES[command], str(backup_ts + DAY))
    refused(world, command, 43, "is outside the restorable window", TIMES[command], "2099-01-01T00:00:00Z")
    refused(world, command, 43, "an older backup for earlier times", TIMES[command], str(backup_ts - DAY))
    refused(world, command, 43, "an older backup for earlier times", TIMES[command], str(backup_ts))
    for text in NO_TIMES:
        if text or command == ("backup", "merge"):  # of a restore, no time is the newest
            refused(world, command, 2, f"{TIMES[command]} {text!r} is not a time", f"{TIMES[command]}={text}")


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_logs(world: World, backup_ts: int, tmp_path: Path, command: CommandPath) -> None:
    """Logs of another cluster, of other keys, too late, too short, missing, with a path as name."""
    mine = world.source.cluster.cluster_id
    place = parse(f"local://{tmp_path}")
    later = backup_ts + DAY
    write_log(place, mine + 1, backup_ts, [later], log_id="other")
    write_log(place, mine, backup_ts, [later], log_id="part", user_range=KeyRange(b"a", b"b"))
    write_log(place, mine, later, [later + DAY], log_id="late")
    write_log(place, mine, backup_ts - DAY, [backup_ts - 1], log_id="short")

    def of(name: str, code: int, words: str) -> None:
        refused(world, command, code, words, "--log-id", name, log=str(tmp_path))

    of("other", 2, f"the log is of cluster {mine + 1}")
    of("part", 2, "does not contain the keys")
    of("late", 2, "Use a backup that is newer than the start of the log")
    of("none", 31, "The logs there are late, other, part, short: pass one of them as --log-id")
    for name in ("late/../other", "..", "/", "other/", "", "a b"):
        of(name, 2, "is not a valid id")
    refused(world, command, 31, "there is no log default", log=world.names["sound"])
    write_log(place, mine, backup_ts - DAY, [backup_ts - 1])
    set_state(open_store(place), "default", LogState.STOPPED)
    refused(world, command, 2, "has ended, and other logs are beside it: late, other, part, short", log=str(tmp_path))
    if command != ("show", "--log"):
        for name in ("short", "default"):
            of(name, 43, f"the log {name} has all rows only up to")


def test_a_time_without_a_log(world: World) -> None:
    """A full backup has the rows of one time only; its log may be forgotten."""
    time = ("--until", world.names["middle"])
    refused(world, ("restore", "raw"), 43, "a log for later ones", *time)
    refused(world, ("backup", "merge"), 2, "there is nothing to merge", "--log", "")


def test_places(world: World) -> None:
    """Existing files are not overwritten."""
    sound = world.names["sound"]
    refused(world, ("backup", "merge"), 30, "already holds a backup", merged=sound)
    refused(world, ("backup", "raw", "--base"), 30, "already holds a backup", increment=sound)


def test_logs_with_names_that_begin_alike(world: World) -> None:
    """Each is its own, at one URL."""
    mine = world.source.cluster.cluster_id
    for name in ("default-2", "def"):
        write_log(parse(f"local://{world.names['log']}"), mine, 7, [9], log_id=name)
    for command in (("log", "status"), ("show", "--log")):
        assert world.call(command).code == 0
    assert tikv_br("log", "status", "-s", world.names["log"], "--id", "def", "--output", "json").last["end_ts"] == 9


@pytest.mark.parametrize("command", [("log", "start"), ("changefeed", "create")], ids=" ".join)
def test_clusters_without_timestamps(world: World, command: CommandPath) -> None:
    """A cluster of API V1TTL has no log: full backups on a schedule are the alternative."""
    sink = () if command == ("log", "start") else ("--sink", "s3://bucket/log")
    refused(world, command, 5, "`tikv-br backup raw` in a crontab", *sink, pd=world.other.pd)
    if sink:
        refused(world, command, 5, "`tikv-br sync --mode diff`", pd=world.other.pd)


@pytest.mark.parametrize("name", ["a/../b", "..", "a b"])
def test_names_of_new_logs(world: World, name: str) -> None:
    """They become paths."""
    refused(world, ("log", "start"), 2, "is not a valid id", "--id", name)
    sink = f"local://{world.names['new']}?id={name}"
    refused(world, ("sync",), 2, "is not a valid id", "--sink", sink)
