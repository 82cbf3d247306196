"""The example in the help of each command, run as written: only addresses, places, times and ids are the test's own."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main

from tests.e2e.command import PROGRAM, QUICK, environment, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.archive.log import LogArchive
from tikv_br.cli.command import leaves
from tikv_br.cli.main import app
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = ("raw put", "raw get", "raw ttl", "raw scan", "raw checksum", "raw import")
BACKUP = (
    "backup abort",
    "backup unlock",
    "check",
    "backup raw",
    "backup txn",
    "list",
    "show",
    "cat",
    "backup find",
    "verify",
    "restore raw",
    "restore txn",
    "diff",
    "export raw",
)
ENDLESS = ("sync", "log start", "changefeed capture", "gc run", "serve")
GROUP = (
    "changefeed create",
    "changefeed list",
    "changefeed query",
    "changefeed pause",
    "changefeed update",
    "changefeed resume",
    "changefeed captures",
    "changefeed processors",
    "changefeed remove",
    "gc status",
    "gc release",
)
LOG = (
    "log status",
    "log metadata",
    "log changes",
    "backup merge",
    "restore point",
    "log pause",
    "log resume",
    "log compact",
    "log truncate",
    "log end",
)
REST = (
    "load raw",
    "raw delete",
    "raw delete-range",
    "drill run",
    "drill list",
    "drill show",
    "drill schedule",
    "backup schedule",
    "backup pin",
    "backup unpin",
    "backup delete",
    "prune",
    "playground start",
    "playground status",
    "playground list",
    "playground stop",
    "config show",
    "config check",
    "config init",
    "version",
    "help",
)
ELSEWHERE = {
    "kafka replay": "needs a broker: tests/integration/incremental/test_kafka_replay.py",
    "spark pack": "copies the whole environment: tests/integration/test_spark_cluster.py",
}
"""Commands whose example is only parsed, and where they are run."""
MORE = {
    "raw delete-range": "--yes",
    "backup delete": "--yes",
    "log end": "--yes",
    "backup txn": "--allow-empty",
    "gc release": "--yes --watch 0s",
    "drill run": "--reports s3://backups/drills",
    "serve": "--listen 127.0.0.1:0",
    "changefeed capture": "--status-addr 0",
}
"""Where no terminal can be asked, and where ports are free."""
LEAVES = [leaf for leaf in leaves(typer.main.get_command(app)) if not leaf[1].hidden]
EXAMPLES = {" ".join(path): str(leaf.epilog).splitlines()[-1] for path, leaf in LEAVES}


def test_each_example_is_run_or_excused() -> None:
    """A new command is put where its example finds what it needs."""
    run = [*ROWS, *BACKUP, *ENDLESS, *GROUP, *LOG, *REST]
    assert sorted([*run, *ELSEWHERE]) == sorted(EXAMPLES)


class Shell:
    """Runs examples in a folder that stands for all buckets, and on two clusters."""

    def __init__(self, folder: Path, source: LiveCluster, target: LiveCluster) -> None:
        self.folder = folder
        self.variables = {**QUICK, "TIKV_BR_OUTPUT": "json"}
        self.variables["XDG_STATE_HOME"] = str(folder / "state")
        self.places = {
            "10.0.0.1:2379": source.pd,
            "10.0.1.1:2379": target.pd,
            "s3://": f"local://{folder}/",
            "/lake/users.parquet": str(folder / "users.parquet"),
            "users.csv": str(folder / "users.csv"),
            "/etc/tikv-br/drill.toml": str(folder / "drill.toml"),
            "/tmp/playground": str(folder / "playground"),
        }

    def words(self, name: str) -> list[str]:
        """The arguments of a command's example."""
        line = f"{EXAMPLES[name]} {MORE.get(name, '')}"
        for place, ours in self.places.items():
            line = line.replace(place, ours)
        return shlex.split(line)[1:]

    def run(self, *names: str) -> None:
        """Run examples to their ends."""
        for name in names:
            done = tikv_br(*self.words(name), stdin=None, timeout=120, forked=True, **self.variables)
            assert done.code == 0, (self.words(name), done)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Run an example beside the block; SIGTERM ends it with 143."""
        output = self.folder / f"{name}.out"
        command, variables = [str(PROGRAM), *self.words(name)], environment(**self.variables)
        with (
            output.open("wb") as file,
            subprocess.Popen(command, stdout=file, stderr=file, env=variables, cwd="/") as process,
        ):
            try:
                yield
                assert process.poll() is None, output.read_text()
                process.terminate()
                assert process.wait(60) == 143, output.read_text()
            finally:
                process.kill()


@pytest.mark.slow
def test_the_examples_of_help(tmp_path: Path) -> None:
    """All end as they should; a sync and a log follow meanwhile, and the restored rows are those of the source."""
    table = pa.table({"id": ["a", "b"], "profile": ["1", "2"]})
    pq.write_table(table, tmp_path / "users.parquet")
    (tmp_path / "users.csv").write_text("key,value\nuser:7,Grace\n")
    (tmp_path / "drill.toml").write_text("")
    with (
        live_cluster(tmp_path / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as source,
        live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target,
    ):
        shell, pd = Shell(tmp_path, source, target), source.cluster.pd
        shell.run(*ROWS, *BACKUP)
        rows = contents(source)
        with contextlib.ExitStack() as stack:
            for name in ENDLESS:
                stack.enter_context(shell.running(name))
            pd.update_service_safe_point("tikv-br-sync-old", 3600, pd.tso())
            shell.run(*GROUP)
            source.raw().put(b"user:7", b"Hopper")
            eventually(lambda: contents(target) == contents(source), 120)
            middle = reach(source, tmp_path / "backups" / "log")
            source.raw().put(b"user:8", b"Ada")
            reach(source, tmp_path / "backups" / "log")
        for time in ("2026-05-02T14:31:00Z", "2026-05-02T00:00:00Z", "2026-04-02T00:00:00Z"):
            shell.places[time] = str(middle)
        target.raw().delete_range(EVERY_KEY)
        shell.run(*LOG)
        assert contents(target) == rows | {b"user:7": b"Hopper"}
        target.raw().delete_range(EVERY_KEY)
        shell.places["3fa2"] = tikv_br("list", "-s", f"{tmp_path}/backups", "--output", "json").last["id"][:4]
        shell.run(*REST)
        assert contents(target) == {b"a": b"1", b"b": b"2"}


def reach(source: LiveCluster, folder: Path) -> int:
    """Wait until the log has come to this moment, which is returned."""
    now, store = source.cluster.pd.tso(), open_store(parse(f"local://{folder}"))

    def has_come() -> bool:
        source.flush(source.store_ids[0])
        return (folder / "default" / "log.json").exists() and LogArchive.open(store, "default").end_ts() > now

    eventually(has_come, 120)
    return now
