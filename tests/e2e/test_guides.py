"""The guides of docs, run as written: each command of a page, where only addresses, places, sizes and times are the test's own."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import PROGRAM, Done, environment, tikv_br
from tests.integration.kafka_server import kafka_broker
from tests.support import etcd as etcd_server
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.tools import ROOT
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion

pytestmark = pytest.mark.slow
ROWS = {b"key%03d" % number: b"value %d" % number for number in range(200)}
SOURCE, TARGET = "10.0.0.1:2379", "10.9.0.1:2379"
LONG = 3 * PATIENCE
SETTINGS = {
    "EXECUTOR": "driver",
    "BACKUP_RAW_SAFE_INTERVAL": "0s",
    "DRILL_RUN_SAFE_INTERVAL": "0s",
    "DRILL_RUN_TARGET_STORES": "1",
    "SYNC_HOLD_BACK": "0s",
    "LOG_START_HOLD_BACK": "0s",
    "LOG_START_FLUSH_INTERVAL": "200ms",
    "SERVE_LISTEN": "127.0.0.1:0",
}
"""Variables that make commands quick; a flag of a page wins."""


def find_commands(text: str) -> list[str]:
    """Commands of a page without the program's name: all of its blocks, and those in its text that name a place or have a placeholder."""
    found = []
    for block, inline in re.findall(r"^```\w*\n(.*?)^```|(?<!`)`([^`\n]+)`", text, re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\\\n\s*", "", block)
        found += re.findall(r"(?<![\w-])tikv-br ([a-z].*)$", lines, re.MULTILINE)
        if command := re.match(r"tikv-br ([a-z].*(?:://|\d\.\d|/etc/|[A-Z]).*)", inline):
            found.append(re.sub(r"[\[\]]", "", command[1]))
    return found


class Page:
    """A page and the places that stand for those which it names. At the end of the block all of its commands have run."""

    def __init__(self, name: str, folder: Path, **places: str) -> None:
        self._left = find_commands((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        assert self._left
        self.folder = folder
        self.places = places
        """By words and parts of words of the page; longer ones first."""
        self.bucket = folder / "storage"
        """In the place of all buckets."""
        self.variables = {f"TIKV_BR_{name}": value for name, value in SETTINGS.items()}
        self.variables |= {"TIKV_BR_OUTPUT": "json", "XDG_STATE_HOME": str(folder / "state")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert kind or not self._left, f"no test runs {self._left}"

    def words(self, start: str) -> list[str]:
        """The first command that begins so and was not used yet."""
        command = next(each for each in self._left if " ".join(each.split()).startswith(start))
        self._left.remove(command)
        for place, ours in sorted(self.places.items(), key=lambda each: -len(each[0])):
            command = re.sub(rf"(?<![\w]){re.escape(place)}(?![\w-])", ours.replace("\\", r"\\"), command)
        command = re.sub(r"s3://([\w/.-]+)\?(?:endpoint|region)=[^\s']*", r"s3://\1", command)
        command = command.replace("s3://", f"local://{self.bucket}/")
        words = shlex.split(command, comments=True)
        return [word for word in words if not word.startswith(">")]

    def run(self, start: str, *more: str, code: int = 0, stdin: str = "") -> Done:
        """Run a command to its end, which must have that exit code."""
        words = [*self.words(start), *more]
        done = tikv_br(*words, stdin=stdin, timeout=LONG, **self.variables)
        assert done.code == code, f"{words}: exit code {done.code}\n{done.out}\n{done.err}"
        return done

    def backup(self, source: LiveCluster, name: str = "backups/2026-11-21", *more: str) -> str:
        """Make a backup that the page takes for granted; its URL."""
        url = f"local://{self.bucket}/{name}"
        done = tikv_br("backup", "raw", "--pd", source.pd, "--storage", url, *more, **self.variables)
        assert done.code == 0, done.err
        return url

    @contextlib.contextmanager
    def running(self, start: str, *more: str) -> Iterator[Callable[[str], dict[str, object]]]:
        """Run a command beside the block, which gets a function that waits for a message of a type; SIGTERM ends it with 143."""
        words = [*self.words(start), *more]
        variables = environment(**self.variables)
        log = self.folder / f"process-{len(self._left)}.out"
        with (
            log.open("wb") as out,
            subprocess.Popen([str(PROGRAM), *words], stdout=out, stderr=out, env=variables, cwd="/") as process,
        ):

            def await_message(kind: str) -> dict[str, object]:
                found: list[dict[str, object]] = []

                def said() -> bool:
                    assert process.poll() is None, log.read_text()
                    lines = [line for line in log.read_text().splitlines(keepends=True) if line.startswith("{")]
                    found[:] = [each for line in lines if line.endswith("\n") if (each := json.loads(line))]
                    found[:] = [each for each in found if each["message_type"] == kind]
                    return bool(found)

                eventually(said, LONG)
                return found[-1]

            try:
                yield await_message
                assert process.poll() is None, log.read_text()
                process.terminate()
                assert process.wait(LONG) == 143, log.read_text()
            finally:
                process.kill()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveCluster, LiveCluster]]:
    """Source and target of the guides."""
    with (
        live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as source,
        live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1) as target,
    ):
        yield source, target


@pytest.fixture
def source(clusters: tuple[LiveCluster, LiveCluster]) -> LiveCluster:
    """With `ROWS` and nothing else."""
    live, _ = clusters
    clear(live)
    live.raw().batch_put(ROWS)
    return live


@pytest.fixture
def target(clusters: tuple[LiveCluster, LiveCluster]) -> LiveCluster:
    """Without rows."""
    _, live = clusters
    clear(live)
    return live


@pytest.fixture
def places(source: LiveCluster, target: LiveCluster) -> dict[str, str]:
    """The addresses that most pages have."""
    return {SOURCE: source.pd, TARGET: target.pd, "SOURCE": source.pd, "TARGET": target.pd}


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The etcd that a real PD contains."""
    with real_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.address


def clear(live: LiveCluster) -> None:
    """Remove all rows of the keyspaces that the guides use."""
    for keyspace in (0, 7, 12):
        live.raw(keyspace).delete_range(b"", b"")


def test_backup(source: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Converted, encrypted, in parts and as Parquet; a dry run writes nothing."""
    key = tmp_path / "backup.key"
    key.write_text("0" * 64)
    source.raw(7).batch_put({b"a": b"1", b"k": b"2", b"m": b"3"})
    with Page("backup", tmp_path, **places, **{"backup.key": str(key)}) as page:
        for name, rows in (("plain", 200), ("checked", 200), ("dry", None), ("parts", 2), ("parquet", 200)):
            page.bucket = tmp_path / name
            done = page.run("backup raw")
            assert (page.bucket / "backups/nightly-1/backupmeta").exists() is (rows is not None)
            if rows:
                assert done.last["total_kvs"] == rows
        page.places |= {"URL": f"local://{tmp_path}/unfinished", "…": source.pd}
        page.run("abort")
        page.run("unlock")


def test_restore(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """All of it, into another keyspace, and under another prefix."""
    source.raw(7).batch_put({b"user1": b"1", b"other": b"2"})
    with Page("restore", tmp_path, **places, **{"executor spark": "executor driver"}) as page:
        name = "backups/nightly-1"
        page.places["URL"] = page.backup(source, name)
        page.run("restore raw")
        assert contents(target) == ROWS
        page.bucket = tmp_path / "both"
        page.backup(source, name, "--keyspace", "all")
        page.run("restore raw")
        assert contents(target, 12) == contents(source, 7)
        page.bucket = tmp_path / "one"
        page.backup(source, name, "--keyspace", "7")
        page.run("restore raw")
        assert contents(target, 7) == {b"user1": b"1"}
        page.run("abort --restores")


def test_undo_delete(source: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Rows that were deleted are back; differences are shown, and the drill of the page passes."""
    with Page("undo-delete", tmp_path, **places, A="6b6579303530", B="6b6579313530") as page:
        url = page.backup(source)
        source.raw().batch_delete(list(ROWS)[:100])
        source.raw().delete_range(b"key100", b"z")
        page.run("restore raw")
        assert contents(source) == ROWS
        page.run("verify")
        source.raw().delete(b"key007")
        page.run("diff --pd 10.0.0.1:2379", code=60)
        page.variables |= {"TIKV_BR_PD": source.pd, "TIKV_BR_STORAGE": url.rpartition("/")[0]}
        page.run("drill run")
        page.places["TARGET"] = page.places[TARGET]
        page.run("diff --pd SOURCE", "--yes", code=0)


def test_managing_backups(source: LiveCluster, tmp_path: Path) -> None:
    """Two backups are listed, shown, read, pinned, and kept by the rules."""
    with Page("managing-backups", tmp_path) as page:
        root = f"local://{page.bucket}/backups/prod"
        for day in ("2026-11-20", "2026-11-21"):
            path = page.backup(source, f"backups/prod/{day}")
        page.places |= {"ROOT": root, "PATH": path, "KEY": "key007", "…": ""}
        listed = page.run("list -s ROOT").lines
        assert len(listed) == 2
        assert page.run("list -s ROOT --rebuild").lines[0]["found"] == 2
        page.places["ID"] = listed[0]["id"]
        assert page.run("show -s ROOT").last["total_kvs"] == page.run("show -s PATH").last["total_kvs"] == len(ROWS)
        for start in ("cat -s ROOT", "cat -s PATH"):
            assert bytes.fromhex(page.run(start).last["value"]) == ROWS[b"key007"]
        page.run("pin")
        page.run("unpin")
        page.run("prune -s s3")
        page.run("prune -s ROOT")


def test_verify_and_diff(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """An intact backup and its restored copy."""
    with Page("verify", tmp_path, **places) as verify, Page("diff", tmp_path, **places) as diff:
        url = verify.backup(source)
        restored = tikv_br("restore", "raw", "--pd", target.pd, "--storage", url, **verify.variables)
        assert restored.code == 0, restored.err
        verify.run("verify")
        verify.run("verify")
        diff.run("diff")
        diff.run("diff")
        target.raw().put(b"more", b"row")
    assert contents(target) != contents(source)


def test_check(places: dict[str, str], tmp_path: Path) -> None:
    """With a task on Spark, and as a plug-in."""
    storage = f"local://{tmp_path}/checked"
    with Page("check", tmp_path, **places, **{"$ARG1$": places[SOURCE], "$ARG2$": storage}) as page:
        page.variables["TIKV_BR_SPARK_MASTER"] = "local[1]"
        page.run("check --pd")
        done = tikv_br(*page.words("check --nagios"))
        assert re.match(r"TIKV-BR (OK|WARNING) - ", done.out), done  # by the machine's free space


def test_reports(source: LiveCluster, tmp_path: Path) -> None:
    """The files are there."""
    html, report = tmp_path / "report.html", tmp_path / "verify.json"
    places = {"pd:2379": source.pd, "/var/www/backups/2026-11-21.html": str(html), "verify.json": str(report)}
    with Page("reports", tmp_path, **places) as page:
        page.run("backup raw")
        page.run("verify")
    assert "<html" in html.read_text()
    assert json.loads(report.read_text())
