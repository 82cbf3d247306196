"""What backups hold, and which keyspace is meant, as commands between two clusters whose PDs name keyspaces."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.log import LogArchive
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = {b"k%04d" % number: b"of features" for number in range(300)}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LiveCluster]:
    """Keyspace 1 is ``features``, with rows."""
    with live_cluster(tmp_path / "source", ApiVersion.V2, stores=1, keyspaces=("features",)) as live:
        assert live.create_keyspace("features") == 1
        live.raw(1).batch_put(ROWS)
        yield live


def test_a_backup_that_leaves_rows_out_says_so(source: LiveCluster, tmp_path: Path) -> None:
    """Also with --quiet, as a cron job has it: an empty one ends with 66, one of a few junk rows with a warning."""
    flags = ("--pd", source.pd, "--executor", "driver", "-q")
    empty = tikv_br("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "empty"))
    assert empty.code == 66
    assert "features (1)" in empty.err
    source.raw(0).put(b"junk", b"v")
    junk = succeed("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "junk"))
    assert "Warning: keyspaces with rows that this backup leaves out: features (1)" in junk.err
    assert junk.out == ""
    succeed("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "first"), "--keyspace", "features")
    assert keyspace_names(source.cluster, [0, 1, 2]) == {1: "features"}
    [listed, *_] = [
        line for line in succeed("list", str(tmp_path / "backups"), "--output", "json").lines if line["path"] == "first"
    ]
    assert (listed["keyspaces"], listed["keyspace_names"], listed["total_kvs"]) == ([1], ["features"], len(ROWS))
    assert "features (1)" in succeed("list", str(tmp_path / "backups")).out
    assert "features" in succeed("show", str(tmp_path / "backups" / "first")).out
    source.raw(1).batch_delete(sorted(ROWS)[10:])
    less = succeed(
        "backup",
        "raw",
        *flags,
        "-s",
        str(tmp_path / "backups" / "second"),
        "--keyspace",
        "features",
        "--safe-interval",
        "0s",
    )
    assert "this backup has 10 rows, less than half of the 300" in less.err


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LiveCluster]:
    """Keyspace 1 is ``billing``."""
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1, keyspaces=("billing",)) as live:
        assert live.create_keyspace("billing") == 1
        yield live


def test_keyspaces_of_another_cluster_are_found_by_name(
    source: LiveCluster, target: LiveCluster, tmp_path: Path
) -> None:
    """Another tenant's keyspace of the same id gets nothing, by whichever command, unless it is named."""
    place = str(tmp_path / "backup")
    succeed("backup", "raw", "--pd", source.pd, "-s", place, "--keyspace", "features", "--executor", "driver")
    restore = ("restore", "raw", "--pd", target.pd, "-s", place)
    follow = ("sync", "--pd", source.pd, "--keyspace", "features", "--sink", f"tikv://{target.pd}", "--start-ts", "now")
    stateful = (*follow, "--state-dir", str(tmp_path / "state"))
    compare = ("diff", "--pd", source.pd, "--keyspace", "features", "--other-pd", target.pd, "--executor", "driver")
    for command in (restore, stateful, (*follow[:-2], "--mode", "diff"), compare):
        refused = tikv_br(*command)
        assert refused.code == 2, refused.err
        assert "has no keyspace features" in refused.err
        assert "keyspace 1 is billing" in refused.err
    assert contents(target, 1) == {}
    assert target.create_keyspace("features") == 2
    assert "features (1) -> features (2)" in succeed(*restore, "--keyspace", "features").out
    assert contents(target, 2) == ROWS
    assert contents(target, 1) == {}
    succeed(*compare)
    succeed("diff", place, "--pd", target.pd, "--executor", "driver")
    assert succeed("cat", place, "k0001", "--keyspace", "features").out.strip() == "of features"
    assert "features (1)" in tikv_br("cat", place, "k0001", "--keyspace", "billing").err
    compared = ("verify", place, "--pd", target.pd, "--level", "restore")
    assert succeed(*compared, "--output", "json").last["rows_checked"] == len(ROWS)
    assert tikv_br(*compared, "--to-keyspace", "billing").code == 41
    assert "found" in succeed("backup", "find", "k0001", "-s", str(tmp_path), "--keyspace", "features").out
    assert "features (1)" in tikv_br("backup", "find", "k0001", "-s", str(tmp_path), "--keyspace", "billing").out
    done = succeed(*restore, "--to-keyspace", "billing", "--output", "json").last
    assert (done["keyspaces"], done["keyspace_names"]) == ([1], ["features"])
    assert (done["target_keyspaces"], done["target_keyspace_names"]) == ([1], ["billing"])
    assert contents(target, 1) == ROWS
    succeed(*compared, "--to-keyspace", "billing", "--prefix", "k00")


UNKNOWN = {
    "backup": "backup raw --pd PD -s DIR/none --keyspace 9",
    "export": "export --pd PD -s DIR/none --keyspace 9",
    "load": "load raw --pd PD --keyspace 9 --input DIR/rows.csv --key-column key --value-column value --staging DIR/staging",
    "raw put": "raw put --pd PD --keyspace 9 k v",
    "raw get": "raw get --pd PD --keyspace 9 k",
    "restore": "restore raw --pd PD -s DIR/one --to-keyspace 9",
    "verify": "verify --pd PD -s DIR/one --level restore --to-keyspace 9",
    "diff": "diff DIR/one --pd PD --other-keyspace 9",
    "diff of clusters": "diff --pd PD --keyspace 9 --other-pd PD --other-keyspace 1",
    "sync": "sync --pd PD --keyspace 9 --sink tikv://PD?keyspace=1 --start-ts now --state-dir DIR/state",
    "sync to": "sync --pd PD --keyspace 1 --sink tikv://PD?keyspace=9 --start-ts now --state-dir DIR/state",
    "sync by diff": "sync --pd PD --keyspace 1 --sink tikv://PD?keyspace=9 --mode diff",
    "log": "log start --pd PD --keyspace 9 -s DIR/log --start-ts now",
}


def test_an_id_that_pd_does_not_know_is_refused(source: LiveCluster, tmp_path: Path) -> None:
    """By every command that takes one, before it reads or writes a row."""
    succeed(
        *("backup", "raw", "--pd", source.pd, "-s", str(tmp_path / "one"), "--keyspace", "features"),
        *("--executor", "driver"),
    )
    (tmp_path / "rows.csv").write_text("key,value\na,b\n")
    for name, command in UNKNOWN.items():
        words = command.replace("PD", source.pd).replace("DIR", str(tmp_path)).split()
        refused = tikv_br(*words)
        assert (refused.code, "the cluster has no keyspace 9" in refused.err) == (2, True), (name, refused.err)


@contextlib.contextmanager
def archiving(words: list[str], end: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Run `log start` beside the block, and end it by a signal."""
    with subprocess.Popen(words, env=environment(), cwd="/", stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(end)
            process.wait(PATIENCE)
    assert process.returncode in {0, 143, -signal.SIGKILL}


def test_a_log_and_a_restore_to_a_time_go_by_the_name(source: LiveCluster, target: LiveCluster, tmp_path: Path) -> None:
    """The log says which keyspace it is of; without one of that name the restore is refused, and writes nothing."""
    full, log = str(tmp_path / "full"), ("--storage", str(tmp_path / "log"))
    succeed("backup", "raw", "--pd", source.pd, "-s", full, "--keyspace", "features", "--executor", "driver")
    follow = ("log", "start", "--pd", source.pd, "--keyspace", "features", *log, "--from-backup", full)
    words = [str(PROGRAM), *follow, "--flush-interval", "200ms", "--hold-back", "0s"]
    with archiving(words):
        eventually((tmp_path / "log" / "default" / "log.json").exists)
        source.raw(1).put(b"later", b"v")
        written = source.cluster.pd.tso()
        store = open_store(parse(log[1]))
        eventually(lambda: LogArchive.open(store, "default").end_ts() > written)
    assert "features (1)" in succeed("log", "status", *log).out
    restore = ("restore", "point", full, *log, "--pd", target.pd)
    refused = tikv_br(*restore)
    assert (refused.code, "has no keyspace features" in refused.err) == (2, True), refused.err
    assert contents(target, 1) == {}
    assert target.create_keyspace("features") == 2
    succeed(*restore)
    assert contents(target, 2) == ROWS | {b"later": b"v"}
    assert contents(target, 1) == {}
    (checkpoint,) = (tmp_path / "log" / "default" / "state").rglob("checkpoint-*.json")
    assert '"keyspace":"features"' in checkpoint.read_text().replace(" ", "")


def test_a_log_of_several_keyspaces(source: LiveCluster, target: LiveCluster, tmp_path: Path) -> None:
    """All that are named are in one log, and a restore to a time finds each by its name; unknown names are refused.

    It is killed and resumed, a restore ingests rows into one of them while it runs, and then it is ended for good.
    """
    assert source.create_keyspace("orders") == 2
    assert source.create_keyspace("billing") == 3
    source.raw(3).batch_put({b"a": b"of billing"})
    full, log = str(tmp_path / "full"), ("--storage", str(tmp_path / "log"))
    both = ("--keyspace", "features", "--keyspace", "billing")
    succeed("backup", "raw", "--pd", source.pd, "-s", full, *both, "--executor", "driver")
    unknown = tikv_br("log", "start", "--pd", source.pd, *both, "--keyspace", "nobody", *log, "--start-ts", "now")
    assert (unknown.code, "nobody" in unknown.err) == (2, True), unknown.err
    follow = ("log", "start", "--pd", source.pd, *both, *log, "--from-backup", full)
    words = [str(PROGRAM), *follow, "--flush-interval", "200ms", "--hold-back", "0s"]
    store, pd = open_store(parse(log[1])), source.cluster.pd

    def wait_for(ts: int) -> None:
        eventually((tmp_path / "log" / "default" / "log.json").exists)
        eventually(lambda: LogArchive.open(store, "default").end_ts() > ts)

    with archiving(words, signal.SIGKILL):
        wait_for(pd.tso())  # after the scan, which has the newest only
        source.raw(2).put(b"a", b"of orders, which is not logged")
        source.raw(1).put(b"a", b"of features")
        source.raw(3).put(b"a", b"newer")
        first = pd.tso()
        source.cluster.flush_timestamps()  # so that no later write has an older one
        wait_for(first)
        source.raw(3).delete(b"a")
    source.raw(1).delete(b"k0000")
    with archiving(words):
        wait_for(pd.tso())
        ingested = succeed("restore", "raw", full, "--pd", source.pd, "--keyspace", "billing", "--allow-overwrite")
        assert "billing (3)" in ingested.out
        source.cluster.flush_timestamps()
        wait_for(pd.tso())
        running = tikv_br("log", "end", *log, "--pd", source.pd, "--yes")
        assert running.code == 78, running.err
    other = tikv_br(*words[1:-4], "--keyspace", "orders")
    assert other.code != 0, "another set of keyspaces is another log"
    succeed("log", "end", *log, "--pd", source.pd, "--yes")
    assert "features (1), billing (3)" in succeed("log", "status", *log, "--level", "data").out
    refused = tikv_br("log", "changes", "a", *log)
    assert (refused.code, "features (1), billing (3)" in refused.err) == (2, True), refused.err
    values = [
        line["value"]
        for line in succeed("log", "changes", "a", *log, "--keyspace", "billing", "--output", "json").lines
    ]
    assert [bytes.fromhex(str(each)) for each in values if each][-2:] == [b"newer", b"of billing"]
    succeed("log", "compact", *log, "--grace", "0s", "--executor", "driver")
    restore = ("restore", "point", full, *log, "--pd", target.pd)
    assert "has no keyspace features" in tikv_br(*restore).err
    assert target.create_keyspace("features") == 2
    succeed(*restore, "--until", str(first), "--allow-inexact")
    assert contents(target, 2) == ROWS | {b"a": b"of features"}
    assert contents(target, 1) == {b"a": b"newer"}
    for name in ("features", "billing"):
        succeed("raw", "delete-range", "--all", "--keyspace", name, "--pd", target.pd, "--yes")
    latest = succeed(*restore, "--allow-inexact")
    assert "features (1), billing (3) -> features (2), billing (1)" in latest.out
    assert contents(target, 2) == contents(source, 1)
    assert contents(source, 1).keys() == ROWS.keys() - {b"k0000"} | {b"a"}
    assert contents(target, 1) == contents(source, 3) == {b"a": b"of billing"}
