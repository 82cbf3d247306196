"""A small world in which commands run in this process, and what of it must not change when one fails."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.truth.calls import CALLS
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.live_txn_backups import back_up, delete_range, write_rows
from tests.support.waiting import eventually
from tikv_br import errors
from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import state_location
from tikv_br.cli import main
from tikv_br.cli.command import CommandPath
from tikv_br.cli.shared import ClusterFlags
from tikv_br.cluster import etcd
from tikv_br.errors import TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.handover import FromBackup
from tikv_br.incremental.sinks.url import LogTarget
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = {b"row%03d" % number: b"value %d" % number for number in range(60)}


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        """The last line of its JSON."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def tikv_br(*arguments: str) -> Ended:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


@dataclass
class World:
    """A cluster with rows, an empty one, one of another kind, an etcd, and a folder of backups."""

    folder: Path
    source: LiveCluster
    target: LiveCluster
    other: LiveCluster
    etcd: str
    names: dict[str, str] = field(default_factory=dict)
    """Values of the names in `CALLS`."""

    def call(self, command: CommandPath, *more: str, **instead: str) -> Ended:
        """Run a command as `CALLS` says, with other things ``instead`` of some, and ``more`` arguments."""
        words = [word.format_map({**self.names, **instead}) for word in CALLS[command].split()]
        end = words.index("--") if "--" in words else len(words)
        return tikv_br(*command, *words[:end], *more, *words[end:])

    def log_to(self, place: Path) -> None:
        """Write a log from the backup until after this moment; it has two segments at least."""
        target = LogTarget(parse(f"local://{place}"), "default", flush_interval=0.1)
        options = SyncOptions(
            changefeed_id="default",
            source=self.source.config,
            target=target,
            state=state_location(target.location, "default"),
            scratch=self.folder,
            start=FromBackup(parse(f"local://{self.names['sound']}")),
            feed=FeedOptions(hold_back=0),
        )
        until = [self.source.cluster.pd.tso()]

        def has_come() -> bool:
            for store_id in self.source.store_ids:  # or their cached timestamps would be waited for
                self.source.flush(store_id)
            try:
                return LogArchive.open(open_store(target.location), "default").end_ts() > until[0]
            except TikvBrError:
                return False

        with ThreadPoolExecutor(1) as thread:
            stop = threading.Event()
            done = thread.submit(sync, options, stop, lambda _replicator: None)
            try:
                eventually(has_come)
                self.source.raw().put(*next(iter(ROWS.items())))
                until[0] = self.source.cluster.pd.tso()
                self.names["middle"] = str(until[0])
                eventually(has_come)
            finally:
                stop.set()
            done.result()

    def picture(self) -> Mapping[str, object]:
        """State that a failed command must not change: rows, finished backups, the folder's records, the log, the group."""
        backups = self.folder / "backups"
        return {
            "source": contents(self.source),
            "target": contents(self.target),
            "other": contents(self.other),
            "backups": {str(path): path.read_bytes() for path in backups.rglob("backupmeta")},
            "log": {str(path): path.read_bytes() for path in (self.folder / "log" / "default").rglob("*.*")},
            "index": {
                str(path): path.read_bytes() for path in (backups / "tikv-br-index").rglob("*") if path.is_file()
            },
            "group": tikv_br(
                "changefeed", "list", "--etcd", self.etcd, "--pd", self.source.pd, "--output", "json"
            ).code,
        }


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Undo what the command line does with signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """All is well in it, and is again after each test."""
    with made(tmp_path_factory.mktemp("world")) as world:
        yield world


@contextlib.contextmanager
def made(folder: Path, *, retry_budget: float = 0.5, **settings: object) -> Iterator[World]:
    """A world of one's own, in a folder, its clusters with ``settings``; in a hurry with clusters and etcd."""
    with contextlib.ExitStack() as stack:
        source, target, other = (
            stack.enter_context(live_cluster(folder / name, version, **settings))
            for name, version in (("source", ApiVersion.V2), ("target", ApiVersion.V2), ("other", ApiVersion.V1TTL))
        )
        server = stack.enter_context(real_etcd(folder / "etcd"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(etcd.Etcd, "__init__", functools.partialmethod(etcd.Etcd.__init__, retry_budget=0.3))
        config = ClusterFlags.config
        patch.setattr(
            ClusterFlags,
            "config",
            # Who refuses is believed at once; who is there may be slow.
            lambda flags: msgspec.structs.replace(config(flags), retry_budget=retry_budget, connect_timeout=60.0),
        )
        world = World(folder, source, target, other, server.address)
        _fill(world)
        yield world


def _fill(world: World) -> None:
    world.source.raw().batch_put(ROWS)
    config = world.folder / "drill.toml"
    config.write_text("")
    places = {
        name: str(world.folder / "backups" / name)
        for name in ("sound", "new", "increment", "merged", "begun", "damaged", "nothing", "exported")
    }
    table = world.folder / "table.parquet"
    pq.write_table(pa.table({"key": list(ROWS), "value": list(ROWS.values())}), table)
    world.names |= {
        **places,
        "table": str(table),
        "staging": str(world.folder / "staging"),
        **{name: str(world.folder / name) for name in ("log", "state", "scratch", "home", "dir", "txn")},
        "folder": str(world.folder / "backups"),
        "pd": world.source.pd,
        "target": world.target.pd,
        "other": world.other.pd,
        "etcd": world.etcd,
        "kafka": "127.0.0.1:1",
        "config": str(config),
        "drill": "20260101",
        "packed": str(world.folder / "packed.tar.gz"),
    }
    world.names["service"] = "nobody-s"
    world.source.cluster.pd.update_service_safe_point("nobody-s", 86400, world.source.cluster.pd.tso())
    for name in ("scratch", "home"):
        Path(world.names[name]).mkdir()
    assert world.call(("backup", "raw"), new=places["sound"]).code == 0
    write_rows(world.source, {b"txn": b"of a transaction"})
    back_up(world.source, Path(world.names["txn"]))
    delete_range(world.source)
    shutil.copytree(places["sound"], places["damaged"])
    victim = next(Path(places["damaged"]).rglob("*.sst"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    world.names["id"] = json.loads(
        tikv_br("list", "-s", world.names["folder"], "--output", "json").out.splitlines()[0]
    )["id"]
    world.log_to(Path(world.names["log"]))
    assert world.call(("changefeed", "create"), "--id", "feed").code == 0


EXIT_NAMES = {each.exit_code: each.__name__ for each in vars(errors).values() if hasattr(each, "exit_code")}


def check_failure(ended: Ended, code: int, what: str, *, is_json: bool) -> None:
    """Check the exit code, and that console and JSON report the same."""
    assert ended.code == code, (what, ended)
    assert "Traceback" not in ended.err + ended.out, (what, ended)
    if not is_json:
        assert "Error: " in ended.err, (what, ended)
        assert "Hint: " in ended.err, (what, ended)
        return
    reported = ended.last
    assert (reported["message_type"], reported["code"], reported["name"]) == ("exit_error", code, EXIT_NAMES[code]), (
        what,
        reported,
    )
    assert reported["message"], what
    assert reported["hint"], what
