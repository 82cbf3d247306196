"""Operations on each version of TiKV that people run: right rows, or a refusal before anything has changed.

The playground emulates the versions; its clients here, and how its rows are read, are none of tikv-br's.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.command import Done, environment, tikv_br
from tests.integration.playground.clients import Client, running
from tests.support.etcd import real_etcd
from tests.support.playground_admin import PlaygroundAdmin
from tests.support.program import run_program
from tests.support.tools import ROOT
from tests.support.waiting import PATIENCE, eventually
from tikv_br.backup import store as store_task
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.cluster import versions
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys import codec
from tikv_br.formats.sst.table import Table
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.settings import ServerVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

pytestmark = pytest.mark.slow
V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
VERSIONS = ("5.4", "6.1.0", "6.1", "6.2", "6.5.3", "6.5", "7.1.1", "7.5", "8.5", "9.0")
UNFIT, ENDED, DIFFERS = 5, 143, 41
TTL = 4
"""Seconds after which some rows expire: after the backups, before the restores."""
QUICK = {"TIKV_BR_BACKUP_RAW_SAFE_INTERVAL": "0s", "TIKV_BR_EXECUTOR": "driver", "TIKV_BR_OUTPUT": "json"}
LASTING = {b"key%02d" % number: b"value %d" % number for number in range(30)}
PASSING = {b"passing%02d" % number: b"soon gone" for number in range(10)}


class Cell:
    """A cluster of one version and one API version, with rows of which some expire."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.playground = client.playground
        self.api_version = self.playground.settings.version
        self.pd = self.playground.state.address
        self.start_ts = self.playground.tso.next()
        for node in self.playground.nodes.values():
            node.causal.flush()
        self.write()
        self.gone_at = time.time() + TTL + 1

    def write(self) -> None:
        """Put all rows: of those that last every third one expires in the far future."""
        has_ttl = self.api_version.has_ttl
        for number, (key, value) in enumerate(LASTING.items()):
            self.client.put(key, value, ttl=100_000 if has_ttl and number % 3 == 0 else 0)
        if has_ttl:
            for key, value in PASSING.items():
                self.client.put(key, value, ttl=TTL)

    def wipe(self) -> None:
        """Remove all rows behind the back of the stores."""
        self.playground.engine.delete_range(b"z", b"{")

    def rows(self) -> dict[bytes, tuple[bytes, bool]]:
        """The live rows by user key: value, and whether they expire."""
        encoding = encoding_of(self.api_version, self.playground.settings.release)
        stored = self.playground.engine.iterate(b"z", b"{")
        skipped = len(self.client.key(b""))
        return {
            key[skipped:]: (value, expire > 0) for key, value, expire, _ in encoding.live_rows(stored, int(time.time()))
        }

    @property
    def expected(self) -> dict[bytes, tuple[bytes, bool]]:
        """Expected `rows` once the others have expired."""
        has_ttl = self.api_version.has_ttl
        return {key: (value, has_ttl and number % 3 == 0) for number, (key, value) in enumerate(LASTING.items())}

    def state(self) -> object:
        """All that a command could change: rows, safe points, import mode, files."""
        nodes = self.playground.nodes.values()
        return (
            dict(self.playground.engine.iterate(b"z", b"{")),
            self.playground.state.gc.services(),
            [node.import_mode.importing for node in nodes],
            sorted(str(path) for path in self.folder.rglob("*")),
        )

    def run(self, *arguments: str) -> Done:
        """Run a command on the cluster to its end, which must come."""
        before = self.state()
        done = tikv_br(*arguments, "--pd", self.pd, timeout=2 * PATIENCE, **QUICK)  # type: ignore[arg-type]
        if done.code:
            assert self.state() == before, done.err
        return done

    def until(self, condition: Callable[[], object], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command until a condition holds, or it ends."""
        before, pids = self.state(), queue.SimpleQueue[int]()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                run_program,
                [*arguments, "--pd", self.pd],
                environment=environment(**QUICK),
                timeout=2 * PATIENCE,
                on_start=pids.put,
            )
            pid = pids.get()
            eventually(lambda: running.done() or condition())
            if not running.done():
                os.kill(pid, signal.SIGTERM)
            done = running.result()
        if done.returncode != ENDED:
            assert self.state() == before, done.stderr
        return done


def is_refused(version: str, api_version: ApiVersion, operation: str) -> bool:
    """Whether this version is too old, or the API version has no change feed."""
    number = ServerVersion.parse(version).number
    if api_version is V2:
        return number < (6, 2)
    if operation == "log":
        return True
    return number < {"backup by scan": (5, 4), "backup by stores": (6, 1), "restore unchecked": (6, 1)}.get(
        operation, (6, 1, 1)
    )


@contextmanager
def cell_of(version: str, api_version: ApiVersion, folder: Path) -> Iterator[Cell]:
    """A cell with a cluster that runs for the length of the block."""
    files = folder / "files"
    files.mkdir(parents=True)
    settings = {"stores": 2, "tikv_version": version, "resolved_ts_interval": 0.1, "ts_ahead": 0.3}
    with running(folder / "cluster", api_version, **settings) as client:  # type: ignore[arg-type]
        admin = PlaygroundAdmin(client.playground.state.address)
        admin.split(codec.encode(client.key(b"key15")) if api_version is V2 else b"key15")
        yield Cell(client, files)
        admin.assert_innocent()


def back_up(cell: Cell) -> Iterator[tuple[str, int]]:
    """Back up by both engines, and read every row of the backups; exit codes by operation."""
    for engine, operation in (("store", "backup by stores"), ("scan", "backup by scan")):
        url = f"local://{cell.folder}/{engine}"
        done = cell.run("backup", "raw", "--storage", url, "--engine", engine)
        yield operation, done.code
        if not done.code and engine == "store":
            assert not cell.run("verify", url, "--level", "data").code


def follow(cell: Cell, target: Cell | None) -> Iterator[tuple[str, int]]:
    """Sync to a file, or, from a cluster without a feed, to another cluster; and log. Every row must arrive."""
    start = ("--start-ts", str(cell.start_ts))
    everything = set(cell.rows())
    if target is None:
        copy = cell.folder / "changes"
        state = str(cell.folder / "state")
        sync = ("sync", *start, "--sink", f"file://{copy}", "--state-dir", state)
        yield "sync", cell.until(lambda: everything <= keys_in(copy), *sync).returncode
    else:
        sync = ("sync", "--mode", "diff", "--interval", "1s", "--sink", f"tikv://{target.pd}")
        # Rows that expire may be gone before the first pass.
        yield "sync", cell.until(lambda: cell.expected.keys() <= target.rows().keys(), *sync).returncode
    log = cell.folder / "log"
    logging = ("log", "start", *start, "--storage", f"local://{log}", "--flush-interval", "200ms")
    yield "log", cell.until(lambda: everything <= logged_keys(log), *logging).returncode


def keys_in(file: Path) -> set[bytes]:
    """The keys that a sync has written to a file."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {bytes.fromhex(json.loads(line)["key"]) for line in lines if line.endswith("}")}


def logged_keys(folder: Path) -> set[bytes]:
    """The keys in the files of a log."""
    tables = [pq.read_table(path) for path in folder.rglob("*.parquet")]
    return {key for table in tables for key in table["key"].to_pylist()}


def restore(cell: Cell, reference: Path) -> Iterator[tuple[str, int]]:
    """Restore into the emptied cluster after rows have expired, into old ones also without checksums; compare."""
    eventually(lambda: time.time() > cell.gone_at)
    is_old = cell.playground.settings.release.number < (6, 2)
    made = [folder for engine in ("store", "scan") if (folder := cell.folder / engine).exists()]
    for folder in made or [reference]:
        url = f"local://{folder}"
        for operation, flags in (("restore unchecked", ["--no-checksum"]), ("restore", [])):
            if is_old or not flags:
                cell.wipe()
                done = cell.run("restore", "raw", "--storage", url, *flags)
                assert cell.rows() == ({} if done.code else cell.expected), done.err
                yield operation, done.code
    yield "verify", cell.run("verify", url, "--level", "restore").code
    if cell.api_version is V2 and is_old:
        yield "raw put", cell.run("raw", "put", "key", "value").code


def run_cell(version: str, api_version: ApiVersion, folder: Path, reference: Path) -> None:
    """Run all operations; each must end with the rows, or with the refusal, that are due."""
    with ExitStack() as stack:
        cell = stack.enter_context(cell_of(version, api_version, folder))
        target = None
        if api_version is not V2:
            target = stack.enter_context(cell_of("8.5", api_version, folder / "target"))
            target.wipe()
        for operation, code in (*back_up(cell), *follow(cell, target), *restore(cell, reference)):
            due = (
                UNFIT
                if is_refused(version, api_version, operation)
                else {"sync": ENDED, "log": ENDED}.get(operation, 0)
            )
            assert code == due, f"{version} {api_version.label} {operation}: exit code {code}, not {due}"


def back_up_in_process(pd: str, url: str) -> list[FileEntry]:
    """Back up by stores with what this test has replaced; the files."""
    place = parse(url)
    backup(BackupOptions(ClusterConfig((pd,)), place, engine="store", executor="driver", safe_interval=0.0))
    return list(BackupSet.open(open_store(place)).files)


@pytest.mark.parametrize("version", ["6.5.3", "7.1.1"])
def test_earlier_backups_that_lack_the_expiry_are_sound(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rows have expired, a restore and a check of all rows succeed; a different row is found. New ones record it."""
    with cell_of(version, V2, tmp_path) as cell:
        url = f"local://{cell.folder}/old"
        with monkeypatch.context() as before:
            before.setattr(versions, "supports", lambda _version, _capability: True)
            assert not any(file.expiry.total_kvs for file in back_up_in_process(cell.pd, url))
        assert any(file.expiry.total_kvs for file in back_up_in_process(cell.pd, f"local://{cell.folder}/new"))
        assert not cell.run("verify", url, "--level", "data").code
        eventually(lambda: time.time() > cell.gone_at)
        cell.wipe()
        assert not cell.run("restore", "raw", "--storage", url).code
        assert cell.rows() == cell.expected
        assert not cell.run("verify", url, "--level", "restore").code
        cell.client.put(b"key07", b"another value")
        assert cell.run("verify", url, "--level", "restore").code == DIFFERS


def test_earlier_backups_with_meaningless_timestamps_are_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timestamps that were recorded of V1TTL files do not count when all rows are read."""

    def as_before(table: Table, _: ApiVersion) -> store_task.Contents:
        first, last = (int.from_bytes(table.properties[f"tikv.{name}_ts"], "big") for name in ("min", "max"))
        return store_task.Contents(first, last, Expiry(), Checksum())

    with running(tmp_path / "cluster", V1TTL, stores=1, tikv_version="7.1.1") as client:
        for key, value in LASTING.items():
            client.put(b"longer than " + key, value)
        pd = client.playground.state.address
        files = back_up_in_process(pd, f"local://{tmp_path}/now")
        assert not any(file.max_ts for file in files)
        monkeypatch.setattr(store_task, "_contents_by_properties", as_before)
        files = back_up_in_process(pd, f"local://{tmp_path}/old")
        assert all(file.max_ts for file in files)
        assert not tikv_br("verify", f"local://{tmp_path}/old", "--level", "data").code


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of API V2, for versions that cannot make one."""
    folder = tmp_path_factory.mktemp("reference")
    with cell_of("8.5", V2, folder) as cell:
        assert not cell.run("backup", "raw", "--storage", f"local://{cell.folder}/store", "--engine", "store").code
    return folder / "files" / "store"


@pytest.mark.parametrize("version", VERSIONS)
def test_operations_succeed_or_refuse_the_version(tmp_path: Path, version: str, reference: Path) -> None:
    """For each API version: no command ends with 0 and other rows, changes anything before it refuses, or never ends."""
    with ThreadPoolExecutor(3) as pool:
        cells = [pool.submit(run_cell, version, api, tmp_path / api.label, reference) for api in (V1, V1TTL, V2)]
    for cell in cells:
        cell.result()


def test_every_command_refuses_a_version_that_is_too_old(tmp_path: Path, reference: Path) -> None:
    """With the store, its version and the needed one; nothing is changed."""
    rows = tmp_path / "rows.csv"
    rows.write_text("k,v\nkey,value\n")
    files = str(tmp_path / "files")
    load = ("--input", str(rows), "--key-column", "k", "--value-column", "v")
    now = ("--start-ts", "now")
    with cell_of("6.1", V2, tmp_path / "old") as cell, real_etcd(tmp_path / "etcd") as etcd:
        group = ("--etcd", etcd.address)
        for command in (
            ("backup", "raw", "--storage", f"local://{files}", "--engine", "scan"),
            ("backup", "raw", "--storage", f"local://{files}", "--engine", "store"),
            ("restore", "raw", "--storage", f"local://{reference}", "--no-checksum"),
            ("restore", "raw", "--storage", f"local://{reference}", "--mode", "put"),
            ("verify", f"local://{reference}", "--level", "restore"),
            ("diff", "--storage", f"local://{reference}"),
            ("export", "--storage", f"local://{files}"),
            ("load", "raw", *load, "--mode", "put"),
            ("load", "raw", *load, "--staging", f"local://{files}"),
            ("raw", "get", "key"),
            ("raw", "put", "key", "value"),
            ("raw", "scan"),
            ("raw", "delete-range", "--start", "a", "--end", "b", "--yes"),
            ("sync", "--sink", "blackhole://", "--state-dir", files, *now),
            ("log", "start", "--storage", f"local://{files}", *now),
            ("changefeed", "create", "--sink", "blackhole://", *now, *group),
            ("changefeed", "capture", *group),
            ("gc", "run", *group),
        ):
            done = cell.run(*command)
            assert done.code == UNFIT, f"{command}: {done.code} {done.err}"
            needs = r"API V2 needs TiKV 6\.2\.0 or newer; store \d+ \(127\.0\.0\.1:\d+\) has version 6\.1\.7"
            assert re.search(needs, done.last["message"]), done.last


def test_a_skipped_check_is_named_in_report_and_manifest(tmp_path: Path) -> None:
    """A backup that its version refuses is made with it, and cannot be mistaken for another one."""
    with cell_of("5.4", V1, tmp_path) as cell:
        url, report = f"local://{cell.folder}/backup", tmp_path / "report.json"
        command = ("backup", "raw", "--storage", url, "--engine", "scan", "--report", str(report))
        assert cell.run(*command, "--checksum").code == UNFIT
        assert not cell.run(*command, "--checksum", "--skip-version-check").code
        notice = "--skip-version-check: the versions of the stores (5.4.3) were not checked"
        assert json.loads(report.read_text())["notices"].count(notice) == 1
        manifest = BackupSet.open(open_store(parse(url))).manifest
        assert manifest is not None
        assert manifest.description.version_check_skipped


def test_a_version_that_was_never_tried_is_a_notice(tmp_path: Path) -> None:
    """Once, by any command, and in its report."""
    with cell_of("9.1", V1, tmp_path) as cell:
        notice = "TiKV 9.1.0 is newer than 9.0.0-beta.2"
        done = cell.run("raw", "get", "key00")
        assert (done.code, done.err.count(notice)) == (0, 1)
        report = cell.folder / "report.json"
        done = cell.run("backup", "raw", "--storage", f"local://{cell.folder}/backup", "--report", str(report))
        assert (done.code, report.read_text().count(notice)) == (0, 1)
        done = cell.run("diff", "--storage", f"local://{cell.folder}/backup", "--report", str(report))
        assert (done.code, report.read_text().count(notice)) == (0, 1)


@pytest.mark.parametrize("api_version", [V1, V2])
def test_a_target_that_executes_late_requests_is_a_notice(tmp_path: Path, api_version: ApiVersion) -> None:
    """Both ways to replicate."""
    with cell_of("8.5", api_version, tmp_path / "new") as cell, cell_of("6.2", api_version, tmp_path / "old") as target:
        target.wipe()
        feed = ("--start-ts", str(cell.start_ts), "--state-dir", str(cell.folder / "state"))
        way = ("--mode", "diff") if api_version is V1 else feed
        sync = ("sync", "--sink", f"tikv://{target.pd}", *way)
        done = cell.until(lambda: LASTING.keys() <= target.rows().keys(), *sync)
        assert done.returncode == ENDED, done.stderr
        assert done.stderr.count("TiKV 6.2.0 lacks the deadline of raw writes, which needs 6.3.0") == 1


def test_check_reports_versions_as_the_docs_show(tmp_path: Path) -> None:
    """The lines of the probe for three versions, without their line breaks."""
    shown = re.search(
        r"^```\n(version .*?)^```", (ROOT / "docs/playground-failpoints.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown
    found = []
    for version, code in (("6.1", 61), ("6.5.3", 0), ("8.5", 0)):
        with running(tmp_path / version, V2, stores=1, tikv_version=version) as client:
            done = tikv_br(
                "check", "--pd", client.playground.state.address, "--executor", "driver", timeout=2 * PATIENCE
            )
        assert done.code == code
        assert re.findall(r"^(\S+) +fail ", done.out, re.MULTILINE) == (["version"] if code else [])
        found += [line for line in done.out.splitlines() if line.startswith("version ")]
    assert " ".join(found).split() == shown[1].split()
