"""Control files that others have changed: whatever runs, what is pinned, of other keyspaces or elsewhere is untouched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.integration.backup.data import when
from tests.support.damage import read_objects
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tests.support.logs import write_log
from tikv_br.archive.records import Checkpoint
from tikv_br.backup.run import backup
from tikv_br.backupset.index import Index, removal_name
from tikv_br.backupset.prune import Removal
from tikv_br.cli.main import run
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill.history import backup_path
from tikv_br.drill.ledger import Creation, EntryKind, Ledger, OwnedRows
from tikv_br.drill.playground import MARK
from tikv_br.errors import StorageFull
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.progress_events import StepFinished
from tikv_br.records import dump
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

EXAMPLES = 500 if settings.get_profile("thorough").max_examples == settings().max_examples else 20
SOURCE, BESIDE, FULL, DRILL, TARGET = 0, 6, 7, 8, 9
ROWS = {each: {b"key-%d" % number: b"of %d" % each for number in range(9)} for each in (SOURCE, BESIDE, FULL)}
"""Of the keyspaces that no command may write to."""
PINNED, VICTIM = "pinned", "victim"
RECORDS = (".json", "backupmeta", "backup.lock")


@dataclass(frozen=True)
class World:
    """A cluster, and a folder with every kind of control file that commands have left there, which is made anew for each example."""

    live: LiveCluster
    folder: Path
    model: Path
    ids: Mapping[str, str]
    """Ids of the backups in the index, by path."""
    middle: str
    """A time within the log."""

    def is_named(self, place: Path) -> bool:
        """Whether a command has the place itself as an argument."""
        return any(str(place) in words for words in self.commands().values())

    def commands(self) -> dict[str, list[str]]:
        """Each that deletes or overwrites. None names what must stay."""
        backups, log, pd = f"{self.folder}/backups", f"{self.folder}/log", ["--pd", self.live.pd]
        threads = ["--executor", "driver"]
        here, beside = ["-s", backups], ["--reports", f"{self.folder}/home", "--work-dir", f"{self.folder}/work"]
        drill = [
            *pd,
            *here,
            *beside,
            *threads,
            "--target",
            "cluster",
            "--target-keyspace",
            str(DRILL),
            "--keep-last",
            "1",
        ]
        backup = ["backup", "raw", *pd, *threads, "--keyspace", str(SOURCE), "--safe-interval", "0", "-s"]
        restore = ["restore", "raw", *pd, *threads, "-s", f"{backups}/new", "--to-keyspace"]
        return {
            "prune": ["prune", *here, "--keep-last", "1", "--yes"],
            "prune-days": ["prune", *here, "--keep-daily", "1", "--include-foreign", "--yes"],
            "delete": ["backup", "delete", *here, self.ids["old"], "--yes"],
            "delete-parent": ["backup", "delete", *here, self.ids["new"], "--yes"],
            "abort": ["backup", "abort", "-s", f"{backups}/half", *pd],
            "abort-restores": ["backup", "abort", "-s", f"{backups}/new", "--restores", *pd],
            "unlock": ["backup", "unlock", "-s", f"{backups}/half", "--force"],
            "truncate": ["log", "truncate", "-s", log, "--until", self.middle, "--yes"],
            "end": ["log", "end", "-s", log, "--yes", *pd],
            "compact": ["log", "compact", "-s", log, *threads],
            "pin": ["backup", "pin", *here, self.ids["old"]],
            "unpin": ["backup", "unpin", *here, self.ids["old"]],
            "rebuild": ["list", *here, "--rebuild"],
            "drill": ["drill", "run", *drill, "--backup", f"{backups}/new"],
            "drill-new": ["drill", "run", *drill, "--backup", "new", "--keyspace", str(SOURCE), "--safe-interval", "0"],
            "backup": [*backup, f"{backups}/another"],
            "resume": [*backup, f"{backups}/half"],
            "restore": [*restore, str(TARGET)],
            "restore-full": [*restore, str(FULL)],
        }  # fmt: skip


def full_storage() -> None:
    """An error that ends a step, and leaves what the same command would resume from."""
    raise StorageFull("full")


def fill(folder: Path, live: LiveCluster) -> None:
    """Leave control files of every kind, by the commands themselves where they leave them."""
    backups, home = folder / "backups", open_store(parse(str(folder / "home")))
    options = BackupOptions(live.config, parse(str(backups)), executor="driver", safe_interval=0.0, keyspaces=("0",))
    for name in ("old", PINNED, "new"):
        backup(structs.replace(options, storage=parse(str(backups / name))))
    base = ["--base", str(backups / "new"), "-s", str(backups / "child"), "--safe-interval", "0"]
    assert run(["backup", "raw", "--pd", live.pd, *base, "--executor", "driver"]) == 0
    with contextlib.suppress(StorageFull):
        backup(structs.replace(options, storage=parse(str(backups / "half"))), when(StepFinished, "copy", full_storage))
    with contextlib.suppress(StorageFull):
        wanted = RestoreOptions(live.config, parse(str(backups / "new")), to_keyspace=str(TARGET))
        restore(wanted, when(StepFinished, "ingest", full_storage))
    index = Index(open_store(parse(str(backups))))
    entries = {each.entry.path: each for each in index.read()}
    index.pin(entries[PINNED].entry)
    gone = Removal(entries["old"].entry.id, "old", (), ("sst/a.sst",))
    index.root.put(removal_name(gone.id), dump(gone))
    drill = ["--reports", str(folder / "home"), "--target", "cluster", "--target-keyspace", str(DRILL)]
    more = ["--backup", "new", "--keyspace", str(SOURCE), "--safe-interval", "0", "--executor", "driver"]
    for _ in range(2):
        assert run(["drill", "run", "--pd", live.pd, "-s", str(backups), *drill, *more]) == 0
    ts = entries["old"].entry.backup_ts
    write_log(parse(str(folder / "log")), live.cluster.cluster_id, ts, [ts + (each << 30) for each in (1, 2, 3)])
    state = ObjectCheckpoints(open_store(parse(str(folder / "home" / "state"))), "sync")
    state.claim()
    state.save(Checkpoint("sync", ts, ts, 1, 5))
    place = folder / VICTIM / "drill-one-01234567"
    (place / "cluster").mkdir(parents=True)
    (place / MARK).write_text("one")
    (folder / VICTIM / "file").write_text("precious")
    ledger, span = Ledger(home, "one"), KeyCodec(ApiVersion.V2, DRILL).rpc_range()
    rows = OwnedRows(live.cluster.cluster_id, ApiVersion.V2, DRILL, (span,), secret="0" * 32)
    for creation in (
        Creation(EntryKind.COPY, "copies/one"),
        Creation(EntryKind.PLAYGROUND, str(place), socket.gethostname()),
        Creation(EntryKind.BACKUP, f"local://{backups}/{backup_path('one')}"),
        Creation(EntryKind.ROWS, "the target", rows=rows),
    ):
        ledger.add(creation)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Where commands have been, and what others have beside it."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch, live_cluster(folder / "cluster", ApiVersion.V2, stores=1) as live:
        patch.setattr(os, "fsync", lambda _file: None)  # power loss is not simulated, and it takes most of the time
        make_keyspaces(live, TARGET)
        for keyspace, rows in ROWS.items():
            live.raw(keyspace).batch_put(rows)
        fill(folder / "place", live)
        entries = [each.entry for each in Index(open_store(parse(str(folder / "place/backups")))).read()]
        ids = {entry.path: entry.id for entry in entries}
        shutil.copytree(folder / "place", folder / "model")
        middle = str(min(entry.backup_ts for entry in entries) + (2 << 30))
        yield World(live, folder / "place", folder / "model", ids, middle)


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:  # noqa: ANN401 - any JSON
    """The place of every value in a document that is neither object nor array."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*place, key))
    else:
        yield place


def forge(draw: Callable[[st.SearchStrategy[Any]], Any], document: Any, values: Sequence[object]) -> bytes:  # noqa: ANN401
    """A record with other values, and the hash that belongs to it."""
    described = document.get("content", document)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(sorted(leaves(described), key=str)))
        inside = described
        for step in path:
            inside = inside[step]
        inside[last] = draw(st.sampled_from(values))
    if described is not document:
        content = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
        document["content_sha256"] = hashlib.sha256(content).hexdigest()
    return (json.dumps(document) + "\n").encode()


def changed(world: World, data: st.DataObject, name: str, objects: Mapping[str, bytes]) -> bytes:
    """The content of a control file: of another one, with other values or other bytes."""
    content = objects[data.draw(st.sampled_from(sorted(objects)))] if data.draw(st.booleans()) else objects[name]
    names = [*world.ids, *world.ids.values(), "half", "one", "", f"../{VICTIM}", VICTIM, f"{world.folder}/{VICTIM}"]
    values: list[object] = [*names, f"local://{world.folder}/{VICTIM}", 0, 1, 6, 1 << 47, (1 << 63) - 1, [], None]
    match data.draw(st.sampled_from(("forged", "forged", "names", "bytes", "whole"))):
        case "forged" if content.startswith(b"{"):
            return forge(data.draw, json.loads(content), values)
        case "names":
            old, new = (data.draw(st.sampled_from(names)) for _ in range(2))
            return content.replace(old.encode() or b"drill", new.encode())
        case "bytes" if content:
            at = data.draw(st.integers(0, len(content) - 1))
            return content[:at] + data.draw(st.binary(max_size=4)) + content[at + 1 :]
    return content


def put_in_place(world: World, data: st.DataObject, name: str, objects: Mapping[str, bytes]) -> None:
    """Replace a control file, now and then by a link to where others have it, or its folder."""
    path = world.folder / name
    if data.draw(st.integers(0, 9)):
        path.write_bytes(changed(world, data, name, objects))
    else:
        # A place that a command names may itself be a link: it is what the operator means.
        moved = path if data.draw(st.booleans()) or world.is_named(path.parent) else path.parent
        shutil.move(moved, world.folder / VICTIM / "moved")
        moved.symlink_to(world.folder / VICTIM / "moved")


def kept(world: World) -> dict[str, bytes]:
    """What no command may remove or change."""
    places = (world.folder / "backups" / PINNED, world.folder / VICTIM)
    return {f"{place.name}/{name}": each for place in places for name, each in read_objects(place).items()}


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_runs_touches_nothing_that_is_pinned_of_others_or_elsewhere(world: World, data: st.DataObject) -> None:
    """A record is replaced by another one, by itself with other values, names or bytes, or by a link; then a command runs."""
    shutil.rmtree(world.folder)
    shutil.copytree(world.model, world.folder)
    objects = read_objects(world.folder)
    mine = [name for name in objects if not name.startswith((f"backups/{PINNED}/", VICTIM)) and name.endswith(RECORDS)]
    kinds: dict[str, list[str]] = {}
    for name in sorted(mine):
        kinds.setdefault(re.sub("[0-9a-f]{2,}", "", Path(name).parent.name + Path(name).name), []).append(name)
    name = data.draw(st.sampled_from(kinds[data.draw(st.sampled_from(sorted(kinds)))]))
    put_in_place(world, data, name, objects)
    before = kept(world)
    command = data.draw(st.sampled_from(sorted(world.commands())))
    code = run(world.commands()[command])
    assert code != 1, "an unexpected error"
    assert kept(world) == before
    assert {keyspace: contents(world.live, keyspace) for keyspace in ROWS} == ROWS
    for keyspace in (DRILL, TARGET) if command.startswith(("drill", "restore")) else ():
        world.live.raw(keyspace).delete_range(EVERY_KEY)
