"""The guides of docs, run as written: each command of a page, where only addresses, places, sizes and times are the test's own."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.e2e.command import PROGRAM, QUICK, Done, environment, tikv_br
from tests.integration.kafka_server import kafka_broker
from tests.interop.line_client import TxnLineClient
from tests.support.etcd import find as find_etcd
from tests.support.etcd import real_etcd
from tests.support.juicefs import JuiceFs
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tests.support.tools import ROOT, find_tool
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.log import LogArchive
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.handover import CACHE_SECONDS
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

pytestmark = pytest.mark.slow
ROWS = {b"key%03d" % number: b"value %d" % number for number in range(200)}
SOURCE, TARGET = "10.0.0.1:2379", "10.9.0.1:2379"
LONG = 3 * PATIENCE
SPARK = {"TIKV_BR_SPARK_MASTER": "local[1]", "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
ELSEWHERE = {
    "migration": "tests/integration/incremental/test_migration.py",
    "point-in-time": "tests/e2e/test_point_in_time_cli.py",
    "spark-cluster": "tests/integration/test_spark_cluster.py",
    "tutorial": "tests/e2e/test_release.py",
}
"""Guides that other modules run."""
REFERENCE = {"configuration", "monitoring"}
"""Pages whose commands are excerpts."""


def find_commands(text: str, program: str) -> list[str]:
    """Commands of a page without the program's name: all of its blocks, and those in its text that name a place or have a placeholder."""
    found = []
    for block, inline in re.findall(r"^```\w*\n(.*?)^```|(?<!`)`([^`\n]+)`", text, re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\\\n\s*", "", block)
        found += re.findall(rf"(?<![\w-]){program} ([a-z].*)$", lines, re.MULTILINE)
        if command := re.match(rf"{program} ([a-z].*(?:://|\d\.\d| /|[A-Z]).*)", inline):
            found.append(re.sub(r"[\[\]]", "", command[1]))
    return found


class Page:
    """A page and the places that stand for those which it names. At the end of the block all of its commands have run."""

    def __init__(
        self, name: str, folder: Path, *, program: str = "tikv-br", until: str = "", since: str = "", **places: str
    ) -> None:
        """`until`, `since`: the heading before or from which on its commands of a program count."""
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        if until or since:
            before, heading, after = text.partition(f"\n## {until or since}\n")
            assert heading
            text = before if until else after
        self._name, self._left = name, find_commands(text, program)
        assert self._left
        self.folder = folder
        self.places = places
        """By words and parts of words of the page; longer ones first."""
        self.bucket = folder / "storage"
        """In the place of all buckets."""
        self.variables = {**QUICK, "TIKV_BR_SERVE_LISTEN": "127.0.0.1:0"}
        self.variables |= {"TIKV_BR_OUTPUT": "json", "XDG_STATE_HOME": str(folder / "state")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert kind or not self._left, f"no test runs {self._left}"

    def skip(self, is_unused: Callable[[str], bool]) -> None:
        """Leave out commands that are for other clusters."""
        self._left = [command for command in self._left if not is_unused(command)]

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

    def run(self, start: str, *more: str, code: int = 0) -> Done:
        """Run a command to its end, which must have that exit code."""
        words = [*self.words(start), *more]
        return self.call(*words, code=code)

    def call(self, *words: str, code: int = 0) -> Done:
        """Run any command with the variables of the test."""
        done = tikv_br(*words, stdin=None, timeout=LONG, forked=True, **self.variables)
        assert done.code == code, f"{words}: exit code {done.code}\n{done.out}\n{done.err}"
        return done

    def backup(self, source: LiveCluster, name: str = "backups/2026-11-21", *more: str) -> str:
        """Make a backup that the page takes for granted; its URL."""
        url = f"local://{self.bucket}/{name}"
        self.call("backup", "raw", "--pd", source.pd, "--storage", url, *more)
        return url

    @contextlib.contextmanager
    def running(self, start: str, *more: str) -> Iterator[Callable[[str], dict[str, object]]]:
        """Run a command beside the block, which gets a function that waits for a message of a type; SIGTERM ends it with 143."""
        words = [*self.words(start), *more]
        variables = environment(**self.variables)
        log = self.folder / f"{self._name}-{len(self._left)}.out"
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
            except BaseException as error:
                error.add_note(f"{words} said, exit code {process.poll()}:\n{log.read_text()}")
                raise
            finally:
                process.kill()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveCluster, LiveCluster]]:
    """Source and target of the guides."""
    with (
        live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as source,
        live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1) as target,
    ):
        for live in (source, target):
            make_keyspaces(live, 12)
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
    """Remove all rows of the keyspaces that the guides use, and the followers that were killed: a sync would wait to see whether they run."""
    for keyspace in (0, 7, 12):
        live.raw(keyspace).delete_range(EVERY_KEY)
    for service, found in live.cluster.ingests.running().items():
        live.cluster.ingests.register_follower(service, structs.replace(found, has_ended=True))


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
        page.run("backup txn", "--allow-empty")
        page.places |= {"URL": f"local://{tmp_path}/unfinished", "…": source.pd}
        page.run("backup abort")
        page.run("backup unlock")


def test_restore(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """All of it, into another keyspace, and under another prefix."""
    source.raw(7).batch_put({b"user1": b"1", b"other": b"2"})
    local = {"executor spark": "executor driver"}
    with Page("restore", tmp_path, until="Undo a mass delete", **places, **local) as page:
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
        page.call("backup", "txn", "--pd", source.pd, "--storage", f"{page.bucket}/backups/metadata", "--allow-empty")
        page.run("restore txn")
        page.run("backup abort URL --restores")


def test_undo_delete(source: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Rows that were deleted are back; differences are shown, and the drill of the page passes."""
    with Page("restore", tmp_path, since="Undo a mass delete", **places, A="key050", B="key150") as page:
        url = page.backup(source)
        source.raw().batch_delete(list(ROWS)[:100])
        source.raw().delete_range(KeyRange(b"key100", b"z"))
        page.run("restore raw")
        assert contents(source) == ROWS
        page.run("verify")
        source.raw().delete(b"key007")
        page.run("diff s3://backups/2026-11-21 --pd", code=60)
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
        assert len(page.run("list s3").lines) == 2
        listed = page.run("list ROOT").lines
        assert len(listed) == 2
        assert page.run("list ROOT --rebuild").lines[0]["found"] == 2
        page.places["ID"] = listed[0]["id"]
        assert page.run("show -s ROOT").last["total_kvs"] == page.run("show PATH").last["total_kvs"] == len(ROWS)
        for start in ("cat -s ROOT", "cat PATH"):
            assert bytes.fromhex(page.run(start).last["value"]) == ROWS[b"key007"]
        page.run("backup pin")
        page.run("backup unpin")
        page.run("backup delete -s s3")
        page.run("prune -s s3")
        page.run("prune -s ROOT")
        page.run("backup delete -s ROOT", "--dry-run")
        page.run("backup delete PATH", "--yes")


def test_verify_and_diff(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """An intact backup and its restored copy."""
    with Page("verify", tmp_path, **places) as verify, Page("diff", tmp_path, **places) as diff:
        url = verify.backup(source)
        verify.call("restore", "raw", "--pd", target.pd, "--storage", url)
        verify.backup(source, "backups/2026-11-22")
        listed = verify.call("list", f"local://{verify.bucket}/backups").lines
        verify.places |= dict(zip(("3fa2", "9b1c"), (line["id"] for line in listed), strict=True))
        for _ in range(3):
            verify.run("verify")
        diff.run("diff")
        diff.run("diff")
        target.raw().put(b"more", b"row")
    assert contents(target) != contents(source)


def test_check(places: dict[str, str], tmp_path: Path) -> None:
    """Also as a plug-in; with threads instead of Spark and more time, as both have limits that a busy machine exceeds."""
    storage = f"local://{tmp_path}/checked"
    patient = {"executor spark": "executor driver", "timeout 8s": "timeout 2m"}
    with Page("check", tmp_path, **places, **patient, **{"$ARG1$": places[SOURCE], "$ARG2$": storage}) as page:
        page.run("check --pd")
        done = tikv_br(*page.words("check --nagios"))
        assert re.match(r"TIKV-BR (OK|WARNING) - ", done.out), done  # by the machine's free space


def test_reports(source: LiveCluster, tmp_path: Path) -> None:
    """The files are there."""
    html, report = tmp_path / "report.html", tmp_path / "verify.json"
    places = {"pd:2379": source.pd, "/var/www/backups/2026-11-21.html": str(html), "verify.json": str(report)}
    with Page("drill", tmp_path, since="Reports of other commands", **places) as page:
        page.run("backup raw")
        page.run("verify")
    assert "<html" in html.read_text()
    assert json.loads(report.read_text())


def test_drill(source: LiveCluster, target: LiveCluster, tmp_path: Path) -> None:
    """The four drills, the one of the crontab with its config file, and what reads the reports."""
    config = tmp_path / "drill.toml"
    places = {"pd:2379": source.pd, "recovery:2379": target.pd, "/etc/tikv-br/drill.toml": str(config)}
    places |= {"1000000": "200", "60s": "1s", "s3://bucket/log": f"local://{tmp_path}/log"}
    with Page("drill", tmp_path, until="Reports of other commands", **places) as page:
        text = (ROOT / "docs/drill.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"^```toml\n(# /etc/tikv-br/drill.toml\n.*?)^```", text, re.MULTILINE | re.DOTALL)
        for place, ours in (
            ("pd:2379", source.pd),
            ("s3://bucket", f"local://{page.bucket}/bucket"),
            ("/var/log", str(tmp_path)),
        ):
            example = example.replace(place, ours)
        config.write_text(example, encoding="utf-8")
        page.variables["TIKV_BR_REPORTS"] = f"local://{page.bucket}/bucket/drills"
        page.run("drill run --pd pd:2379 --storage s3://bucket/backups --rpo")
        log = Page(
            "log", tmp_path, **{SOURCE: source.pd}, east="default", **{"s3://backups/log": places["s3://bucket/log"]}
        )
        log.places["s3://backups/2026-11-22"] = (
            f"local://{next((page.bucket / 'bucket/backups').glob('*/backupmeta')).parent}"
        )
        with log.running("log start"):
            reach(source, tmp_path / "log", "default")
        page.run("drill run --pd pd:2379 --storage s3://bucket/backups --backup newest --scenario")
        page.places["drills"] = "12"  # a playground
        page.run("drill run --pd pd:2379 --storage s3://bucket/backups --backup newest --target-keyspace")
        page.run("drill run --pd pd:2379 --storage s3://bucket/backups --target-pd")
        page.run("drill run --config")
        assert str(config) in page.run("drill schedule").out
        listed = page.call("drill", "list").lines
        assert [line["verdict"] for line in listed] == ["passed"] * 5
        page.places["ID"] = listed[0]["id"]
        page.run("drill show")


def reach(source: LiveCluster, folder: Path, name: str) -> None:
    """Wait until a log has come to this moment."""
    now, store = source.cluster.pd.tso(), open_store(parse(f"local://{folder}"))

    def has_come() -> bool:
        source.flush(source.store_ids[0])
        return (folder / name / "log.json").exists() and LogArchive.open(store, name).end_ts() > now

    eventually(has_come, LONG)


def test_sync(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """The target gets what is written later."""
    with Page("sync", tmp_path, **places, **{"/var/lib/tikv-br": str(tmp_path / "state")}) as page:
        page.run("backup raw")
        page.run("restore raw")
        with page.running("sync"):
            source.raw().put(b"later", b"change")
            eventually(lambda: contents(target) == {**ROWS, b"later": b"change"}, LONG)
        page.run("diff")


def test_failover(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """A planned switch, writes at B, then A returns with rows of its own and becomes the standby of B."""
    target.raw().batch_put(ROWS)
    time.sleep(CACHE_SECONDS)  # a sync from now on would miss what the test before has ingested
    with Page("failover", tmp_path, **places) as page:
        page.run("diff")
        with page.running("sync") as await_message:
            eventually(lambda: "checkpoint_ts" in await_message("status"), LONG)
            target.raw().put(b"at b", b"after the switch")
            eventually(lambda: contents(source) == {**ROWS, b"at b": b"after the switch"}, LONG)
        source.raw().put(b"only a", b"lost")
        target.raw().delete(b"key001")
        lost = page.run("diff", code=60)
        assert {
            (bytes.fromhex(each["key"]), each["kind"]) for each in lost.lines if each["message_type"] == "different_key"
        } == {
            (b"only a", "only_b"),
            (b"key001", "only_b"),
        }
        page.run("backup raw", "--safe-interval", "0s")
        page.run("raw delete-range", "--yes")
        page.run("restore raw")
        with page.running("sync"):
            target.raw().put(b"later", b"change")
            eventually(lambda: contents(source) == contents(target), LONG)
        assert b"only a" not in contents(source)


def test_log(source: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Written by the command, compacted, continued by the unit, and written by a sync; no lock is left."""
    with Page("log", tmp_path, **places) as page:
        folder = page.bucket / "backups/log"
        page.places["URL/NAME"] = f"local://{folder}/east"
        page.run("backup raw")
        with page.running("log start"):
            reach(source, folder, "east")
            page.run("log status")
        page.run("log compact")
        with page.running("log start"):
            reach(source, folder, "east")
        page.run("backup unlock")
        with page.running("sync", "--pd", source.pd, "--id", "archive", "--start-ts", "now"):
            eventually((folder / "archive" / "log.json").exists, LONG)


def test_changefeeds(
    source: LiveCluster, target: LiveCluster, etcd: str, places: dict[str, str], tmp_path: Path
) -> None:
    """A capture takes the changefeed over."""
    playground = tmp_path / "playground"
    with Page("changefeeds", tmp_path, until="Captures", **places, **{"/tmp/pg": str(playground)}) as page:
        page.variables |= {"TIKV_BR_ETCD": etcd, "ETCD_BINARY": find_etcd()}
        page.backup(source)
        with page.running("changefeed capture"):
            page.run("changefeed create")
            source.raw().put(b"later", b"change")
            eventually(lambda: contents(target).get(b"later"), LONG)
            assert page.run("changefeed list").last["state"] == "normal"
        assert page.run("playground start").last["etcd"]
        assert tikv_br("playground", "stop", "--dir", str(playground)).code == 0


def test_gc(source: LiveCluster, etcd: str, places: dict[str, str], tmp_path: Path) -> None:
    """The worker sets the safe point; the safe point of a sync is shown and removed."""
    metrics = tmp_path / "gc.prom"
    with Page(
        "gc", tmp_path, **places, **{"8301": "0", "/var/lib/node_exporter/tikv_br_gc.prom": str(metrics)}
    ) as page:
        page.variables["TIKV_BR_ETCD"] = etcd
        with page.running("gc run") as wait_for:
            wait_for("gc")
        with page.running("gc run") as wait_for:
            wait_for("listening")
        pd = source.cluster.pd
        pd.update_service_safe_point("tikv-br-sync-old", 3600, pd.tso())
        assert "tikv-br-sync-old" in {line.get("service") for line in page.run("gc status").lines}
        page.run("gc release", "--yes", "--watch", "0s")
        page.run("gc status")
        assert metrics.read_text()
        assert "tikv-br-sync-old" not in metrics.read_text()


def test_serve(source: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """The overview has the backup, and an error where a status page does not answer; with a token it asks for it."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    places |= {"10.0.0.5:8300": "127.0.0.1:1", "0.0.0.0:8390": "127.0.0.1:0", "token": str(token)}
    with Page("serve", tmp_path, **places) as page:
        page.backup(source, "backups/full/first")
        with page.running("serve") as wait_for:
            with urllib.request.urlopen(f"{wait_for('listening')['url']}api/overview.json", timeout=LONG) as answer:
                overview = json.loads(answer.read())
            assert len(overview["storages"][0]["backups"]) == 1
        with page.running("serve") as wait_for, pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{wait_for('listening')['url']}api/overview.json", timeout=LONG)


def test_export(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Exports of a cluster and of a backup are loaded again."""
    csv = f"local://{tmp_path}/csv"
    with Page("export", tmp_path, **places) as page:
        page.run("export raw --pd")
        (parquet,) = (page.bucket / "lake/rows").glob("*.parquet")
        page.bucket = tmp_path / "second"
        page.backup(source)
        page.run("export raw s3://backups")
        rows = ["export", "raw", "--pd", source.pd, "--storage", csv, "--format", "csv", "--encoding", "escaped"]
        page.call(*rows)
        page.places |= {"part-00000.parquet": str(parquet), "part-00000.csv": f"{tmp_path}/csv/part-00000.csv"}
        for name in ("parquet", "csv"):
            page.run(f"raw import part-00000.{name}")
            assert contents(target) == ROWS
            clear(target)


def test_load(target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """As SSTs and by puts."""
    table, pairs = tmp_path / "users.parquet", tmp_path / "pairs.parquet"
    for path, names in ((table, ("id", "profile")), (pairs, ("key", "value"))):
        pq.write_table(pa.table([[*ROWS], [*ROWS.values()]], names), path)
    with Page("load", tmp_path, **places, **{"/lake/users.parquet": str(table), "FILE": str(pairs)}) as page:
        page.variables |= {**SPARK, "TIKV_BR_LOAD_RAW_PARTITIONS": "1", "TIKV_BR_PD": target.pd}
        for command in ("load raw --pd", "load raw --mode", "raw import"):
            page.run(command)
            assert contents(target) == ROWS
            clear(target)
        rows = tmp_path / "rows"
        target.raw().batch_put(ROWS)
        page.call("export", "raw", "--pd", target.pd, "--storage", str(rows), "--format", "csv")
        clear(target)
        page.places["/lake/rows"] = str(rows)
        page.run("load raw")
        assert contents(target) == ROWS


def test_kafka(source: LiveCluster, target: LiveCluster, places: dict[str, str], tmp_path: Path) -> None:
    """Changes come to a topic, and from there to a cluster."""
    with (
        kafka_broker() as broker,
        Page("kafka", tmp_path, **places) as page,
        Page("kafka-replay", tmp_path, **{"10.0.1.1:2379": target.pd}) as replay,
    ):
        broker.create_topic("changes")
        page.places |= {"10.0.2.1:9092,10.0.2.2:9092": broker.address, "/var/lib/tikv-br": str(tmp_path / "state")}
        replay.places["10.0.2.1:9092"] = broker.address
        page.run("backup raw")
        replay.run("restore raw")
        with page.running("sync"), replay.running("kafka replay"):
            source.raw().put(b"later", b"change")
            eventually(lambda: contents(target) == {**ROWS, b"later": b"change"}, LONG)


def test_playground_and_captures(source: LiveCluster, target: LiveCluster, etcd: str, tmp_path: Path) -> None:
    """A playground is started, used and stopped; a capture listens."""
    with Page("playground", tmp_path, **{"/tmp/v1": str(tmp_path / "v1")}) as page:
        page.places["127.0.0.1:41965"] = page.run("playground start").last["pd"]
        page.run("raw put")
        page.run("playground stop")
    with Page("README", tmp_path, **{"/tmp/try": str(tmp_path / "try"), "12379": "0"}) as page:
        page.places["127.0.0.1:12379"] = page.run("playground start").last["pd"]
        page.places["/tmp/try-backup"] = str(tmp_path / "try-backup")
        page.run("raw put")
        page.run("backup raw")
        page.run("verify")
        page.call("playground", "stop", "--dir", str(tmp_path / "try"))
    places = {"--etcd 10.0.0.1:2379": f"--etcd {etcd}", SOURCE: source.pd, "0.0.0.0:8300": "127.0.0.1:0"}
    with Page("changefeeds", tmp_path, since="Captures", **places, SOURCE=source.pd, TARGET=target.pd) as page:
        with page.running("changefeed capture") as wait_for:
            wait_for("listening")
        page.run("diff", code=60)


def test_juicefs(tmp_path: Path) -> None:
    """A file system with files: all restored copies have all of their objects."""
    with (
        live_cluster(tmp_path / "source", ApiVersion.V1, stores=1) as source,
        live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target,
    ):
        volume = JuiceFs(source.pd, tmp_path, "myvol")
        volume.format()
        volume.copy_in(ROOT / "docs" / "images", "images")
        places = {SOURCE: source.pd, TARGET: target.pd, "/tmp/rehearsal": str(tmp_path / "rehearsal")}
        with (
            Page("juicefs", tmp_path, **places) as page,
            Page("juicefs", tmp_path, program="juicefs", **places) as juicefs,
        ):
            volume.run(*juicefs.words("config"), "--yes")
            expected = volume.dump()
            page.run("backup txn")
            page.run("verify")
            page.run("restore txn")
            volume.run(*juicefs.words("fsck"))
            assert JuiceFs(target.pd, tmp_path, "myvol").dump() == expected
            page.run("restore txn")
            volume.run(*juicefs.words("fsck"))
            assert JuiceFs(source.pd, tmp_path, "restored").dump() == expected
            started = page.run("playground start").last["pd"]
            page.places["127.0.0.1:41965"] = juicefs.places["127.0.0.1:41965"] = started
            page.run("restore txn")
            volume.run(*juicefs.words("fsck"))
            page.run("playground stop")


@pytest.mark.parametrize("version", [ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def test_surrealdb(version: ApiVersion, etcd: str, tmp_path: Path) -> None:
    """Rows of transactions come back, in API V1 and from one keyspace into another; and GC runs."""
    program = find_tool("client_go", hint="run scripts/install_client_go.sh, or set CLIENT_GO", variable="CLIENT_GO")
    rows = {b"/*surreal": b"1", b"\xff" * 9: b"long" * 100}
    is_v2 = version is ApiVersion.V2
    with (
        live_cluster(tmp_path / "source", version, stores=1) as source,
        live_cluster(tmp_path / "target", version, stores=1) as target,
        Page("surrealdb", tmp_path, **{SOURCE: source.pd, TARGET: target.pd}) as page,
    ):
        if is_v2:
            create_keyspace(source, "surreal")
            create_keyspace(target, "copy")
        with TxnLineClient([program, source.pd, "txn", *["surreal"] * is_v2]) as client:
            client.write(rows)
        unused = "s3://backups/surreal/2026-11-21" if is_v2 else "keyspace"
        page.skip(lambda command: unused in command)
        page.run("backup txn")
        if not is_v2:
            page.run("verify")
        page.run("restore txn")
        with TxnLineClient([program, target.pd, "txn", *["copy"] * is_v2]) as client:
            assert dict(client.scan(b"", b"")) == rows
        page.variables["TIKV_BR_ETCD"] = etcd
        with page.running("gc run") as wait_for:
            wait_for("gc")


def create_keyspace(live: LiveCluster, name: str) -> None:
    """Create a keyspace as an operator does."""
    body = json.dumps({"name": name}).encode()
    with urllib.request.urlopen(f"http://{live.pd}/pd/api/v2/keyspaces", body, timeout=LONG):
        pass


def test_real_tikv(tmp_path: Path) -> None:
    """The page's commands after its servers have started, on a playground in place of those."""
    with (
        live_cluster(tmp_path / "one", ApiVersion.V2, stores=1) as live,
        Page("real-tikv", tmp_path, **{"127.0.0.1:2379": live.pd}) as page,
    ):
        page.run("raw import")
        page.run("check")
        page.run("backup raw")
        page.run("raw delete-range")
        assert page.run("restore raw").last["total_kvs"] == 20_000


def test_all_guides() -> None:
    """Each page with commands is run here, or by the module that is named."""
    here = set(re.findall(r'Page\(\s*"([\w-]+)"', Path(__file__).read_text(encoding="utf-8")))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    blocks = {page: re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for page, text in texts.items()}
    pages = {page for page, found in blocks.items() if re.search(r"^(\$ )?tikv-br ", "".join(found), re.MULTILINE)}
    assert pages == here | set(ELSEWHERE) | REFERENCE
    for page, module in ELSEWHERE.items():
        assert page in (ROOT / module).read_text(encoding="utf-8")
