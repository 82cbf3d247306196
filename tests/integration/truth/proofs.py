"""Proof, for each command that ends, that it did what it reported."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.backup.reading import rocksdb_rows
from tests.integration.truth.conftest import ROWS, Ended, World, tikv_br
from tests.support.live_cluster import contents
from tests.support.live_txn_backups import delete_range, read_rows
from tests.support.live_txns import Txns, prefix_of
from tikv_br.backupset import manifest
from tikv_br.backupset.lease import Lease, LeaseOwner
from tikv_br.cli.command import CommandPath
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.pd_http import gc_status
from tikv_br.formats.keys.codec import encode
from tikv_br.playground.home import Home
from tikv_br.records import dump
from tikv_br.tasks import pack

BACKUPS = ("sound", "new", "increment", "merged")
Proof = Callable[[World, Ended], bool]


def group(world: World, name: str) -> str:
    """Keys and values of a changefeed in etcd, as text."""
    with Etcd.connect([world.etcd]) as etcd:
        found = etcd.range("/tikv-br/").items
    own = (item for item in found if item.key.endswith(f"/{name}"))
    return "".join(f"{item.key}\n{json.dumps(json.loads(item.value))}" for item in own)


def backed_up(world: World, _ended: Ended) -> bool:
    """RocksDB reads as many rows as the source has, under their keys."""
    rows = rocksdb_rows(Path(world.names["new"]), world.folder / "scratch")
    return len(rows) == len(ROWS) and (Path(world.names["new"]) / "backupmeta").exists()


def transactions_backed_up(world: World, ended: Ended) -> bool:
    """RocksDB reads the one row, at its commit ts."""
    place = Path(f"{world.names['home']}-txn")
    (key,) = rocksdb_rows(place, world.folder / "scratch")
    return key.startswith(b"z" + encode(b"x\0\0\0txn")) and ended.last["total_kvs"] == 1


def transactions_restored(world: World, ended: Ended) -> bool:
    """A reader of the target finds the one row; the next restore finds it empty."""
    rows = read_rows(world.target)
    delete_range(world.target)
    return set(rows) == {b"txn"} and ended.last["verified"] is True


def listed(_world: World, ended: Ended) -> set[str]:
    """The ids that the output names."""
    return {line["id"] for line in map(json.loads, ended.out.splitlines())}


def ids(world: World) -> set[str]:
    """The ids in the folder's index."""
    return {path.stem for path in Path(world.names["folder"], "tikv-br-index", "entries").iterdir()}


def rehearsed(world: World, ended: Ended) -> bool:
    """The report is there and says the same; nothing but the backup is left."""
    world.names["drill"] = ended.last["id"]
    report = json.loads(Path(world.names["home"], "reports", f"{ended.last['id']}.json").read_text())
    return report["verdict"] == "passed" and not list(Path(world.names["home"]).glob("ledger/*"))


def is_running(world: World) -> bool:
    """Whether a process holds the playground's lock."""
    return Home(Path(world.names["dir"])).is_running()


def restored(world: World, _ended: Ended) -> bool:
    """The target has the rows; the next restore finds it empty."""
    rows = contents(world.target)
    world.target.raw().batch_delete(list(rows))
    return rows == ROWS


def is_increment(world: World, _ended: Ended) -> bool:
    """RocksDB reads the two rows that were written since, and the index knows what it continues."""
    place = Path(world.names["increment"])
    lines = map(json.loads, tikv_br("list", "-s", world.names["folder"], "--output", "json").out.splitlines())
    parents = {Path(line["url"]).name: Path(line["parent"]).name for line in lines}
    return len(rocksdb_rows(place, world.folder / "scratch")) == 2 and parents[place.name] == "sound"


def merged(world: World, _ended: Ended) -> bool:
    """RocksDB reads as many rows as there were."""
    return len(rocksdb_rows(Path(world.names["merged"]), world.folder / "scratch")) == len(ROWS)


def log_file(world: World, name: str) -> str:
    """The text of a record of the log; empty if there is none."""
    path = Path(world.names["log"], "default", name)
    return path.read_text() if path.exists() else ""


def segments(world: World) -> list[str]:
    """The names of the log's segments: FROM-TO-SPAN-TOKEN."""
    return [path.stem for path in Path(world.names["log"], "default", "segments").iterdir()]


def log_rows(world: World) -> int:
    """Rows of the log's files, as pyarrow counts them."""
    files = Path(world.names["log"], "default", "data").rglob("*.parquet")
    return sum(pq.read_metadata(path).num_rows for path in files)


def stopped(world: World, _ended: Ended) -> bool:
    """Recorded as stopped, and PD has no safe point of it."""
    services = gc_status(world.source.cluster.pd_http).services
    return '"stopped"' in log_file(world, "control.json") and "tikv-br-sync-default" not in {
        each.service for each in services
    }


def services(world: World) -> dict[str, int]:
    """The service safe points that PD lists."""
    document = world.source.get("/pd/api/v1/gc/safepoint")
    return {each["service_id"]: each["safe_point"] for each in document["service_gc_safe_points"]}


def listed_services(world: World, ended: Ended) -> bool:
    """As many safe points as PD's own list has, and GC's."""
    document = world.source.get("/pd/api/v1/gc/safepoint")
    expected = services(world)
    first, *rest = [json.loads(line) for line in ended.out.splitlines()]
    found = {each["service"]: each["safe_point"] for each in rest} | {"gc_worker": first["worker_safe_point"]}
    return len(found) > 1 and found == expected and first["safe_point"] == document["gc_safe_point"]


def scanned(ended: Ended) -> dict[bytes, bytes]:
    """The rows of the output."""
    found = [json.loads(line) for line in ended.out.splitlines()]
    return {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in found}


def exported(world: World, ended: Ended) -> bool:
    """Python's own readers find the rows, and the export is marked complete."""
    place, found = Path(world.names["exported"]), dict[bytes, bytes]()
    for path in place.glob("part-*.jsonl"):
        rows = map(json.loads, path.read_text().splitlines())
        found |= {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in rows}
    for path in place.glob("part-*.csv"):
        lines = csv.DictReader(path.read_text().splitlines())
        found |= {row["key"].encode(): row["value"].encode() for row in lines}
    return (place / "_SUCCESS").exists() and found == ROWS and ended.last["total_kvs"] == len(ROWS)


def packed(world: World, ended: Ended) -> bool:
    """The archive has all files, the interpreter's starter and this package among them."""
    with tarfile.open(world.names["packed"]) as archive:
        names = [each.name for each in archive]
    return (
        len(names) == ended.last["files"]
        and "bin/python" in names
        and any("tikv_br/tasks/pack" in name for name in names)
    )


PROOFS: dict[CommandPath, Proof] = {
    ("backup", "raw"): backed_up,
    ("backup", "txn"): transactions_backed_up,
    ("restore", "raw"): restored,
    ("restore", "txn"): transactions_restored,
    ("restore", "raw", "--log"): restored,
    ("restore", "point"): restored,
    ("load", "raw"): lambda world, ended: (
        restored(world, ended) and not list(Path(world.names["staging"]).rglob("*.sst"))
    ),
    ("backup", "merge"): merged,
    ("verify",): lambda _, ended: ended.last["rows_checked"] == len(ROWS),
    ("diff",): lambda world, ended: contents(world.source) == ROWS and ended.last["rows"] == len(ROWS),
    ("export", "raw"): exported,
    ("export", "raw", "--from-backup"): exported,
    ("changefeed", "create"): lambda world, _: '"state": "normal"' in group(world, "changefeed/other"),
    ("changefeed", "list"): lambda world, ended: listed(world, ended) == {"feed", "other"},
    ("changefeed", "query"): lambda world, ended: "feed" in listed(world, ended),
    ("changefeed", "pause"): lambda world, _: '"state": "paused"' in group(world, "changefeed/feed"),
    ("changefeed", "update"): lambda world, _: '"concurrency": 9' in group(world, "changefeed/feed"),
    ("changefeed", "resume"): lambda world, _: '"state": "normal"' in group(world, "changefeed/feed"),
    ("changefeed", "remove"): lambda world, _: not group(world, "changefeed/feed"),
    ("changefeed", "captures"): lambda _, ended: not ended.out,
    ("changefeed", "processors"): lambda _, ended: not ended.out,
    ("check",): lambda _, ended: ended.last["fail"] == 0,
    ("gc", "status"): listed_services,
    ("gc", "release"): lambda world, _: world.names["service"] not in services(world),
    ("list",): lambda world, ended: listed(world, ended) == ids(world),
    ("show",): lambda _, ended: ended.last["total_kvs"] == len(ROWS),
    ("show", "--log"): lambda world, ended: (
        ended.last["backup_ts"] < ended.last["window_start"] < int(world.names["middle"]) < ended.last["window_end"]
    ),
    ("log", "status"): lambda world, ended: (ended.last["rows"], ended.last["gaps"]) == (log_rows(world), []),
    ("log", "changes"): lambda _, ended: bytes.fromhex(ended.last["key"]) == b"row000",
    ("log", "metadata"): lambda world, ended: len(ended.out.splitlines()) == len(segments(world)),
    ("log", "pause"): lambda world, _: '"paused"' in log_file(world, "control.json"),
    ("log", "resume"): lambda world, _: '"active"' in log_file(world, "control.json"),
    ("log", "compact"): lambda world, ended: (
        ended.last["removed_segments"] == ended.last["segments"]
        and sum(int(name.split("-")[1], 16) <= int(world.names["middle"]) for name in segments(world)) == 1
    ),
    ("log", "truncate"): lambda world, _: (
        world.names["middle"] in log_file(world, "truncated.json")
        and all(int(name.split("-")[1], 16) > int(world.names["middle"]) for name in segments(world))
    ),
    ("log", "end"): stopped,
    ("backup", "find"): lambda _, ended: hashlib.sha256(ROWS[b"row007"]).hexdigest() in ended.out,
    ("cat",): lambda _, ended: bytes.fromhex(ended.last["value"]) == ROWS[b"row007"],
    ("backup", "pin"): lambda world, _: Path(
        world.names["folder"], "tikv-br-index", "pins", world.names["id"]
    ).exists(),
    ("backup", "unpin"): lambda world, _: (
        not Path(world.names["folder"], "tikv-br-index", "pins", world.names["id"]).exists()
    ),
    ("backup", "delete"): lambda world, ended: (
        not Path(world.names["new"]).exists() and ended.last["id"] not in ids(world) and len(ids(world)) > 1
    ),
    # The last one is the increment, which needs what it continues. Beside them stays the drill's, which counts apart.
    ("prune",): lambda world, _: (
        {name for name in BACKUPS if Path(world.names[name], "backupmeta").exists()} == {"increment", "sound"}
        and len(ids(world)) == 3
    ),
    ("backup", "abort"): lambda world, _: not any(path.is_file() for path in Path(world.names["begun"]).rglob("*")),
    ("backup", "unlock"): lambda world, ended: ended.last["held"] and world.call(("backup", "abort")).code == 0,
    ("drill", "run"): rehearsed,
    ("drill", "list"): lambda world, ended: listed(world, ended) == {world.names["drill"]},
    ("drill", "show"): lambda world, ended: world.names["drill"] in ended.out,
    ("backup", "schedule"): lambda _world, ended: "backup raw --pd 10.0.0.1:2379" in ended.out,
    ("drill", "schedule"): lambda world, ended: world.names["config"] in ended.last["text"],
    ("raw", "put"): lambda world, _: contents(world.source)[b"new"] == b"value",
    ("backup", "raw", "--base"): is_increment,
    ("raw", "get"): lambda _, ended: bytes.fromhex(ended.last["value"]) == ROWS[b"row007"],
    ("raw", "delete"): lambda world, _: contents(world.source) == ROWS,
    ("raw", "delete-range"): lambda world, _: contents(world.source) == ROWS,
    ("raw", "ttl"): lambda _, ended: ended.last["ttl"] == 0,
    ("raw", "checksum"): lambda _, ended: (
        (ended.last["total_kvs"], ended.last["total_bytes"])
        == (len(ROWS), sum(len(key) + 4 + len(value) for key, value in ROWS.items()))
    ),
    ("raw", "scan"): lambda _, ended: scanned(ended) == ROWS,
    ("raw", "import"): lambda world, _: len(contents(world.target)) == 50,
    ("playground", "start"): lambda world, _: is_running(world),
    ("playground", "status"): lambda world, ended: ended.last["running"] is is_running(world) is True,
    ("playground", "list"): lambda world, ended: world.names["dir"] in ended.out,
    ("playground", "stop"): lambda world, _: not is_running(world),
    ("config", "show"): lambda _, ended: not ended.out,
    ("config", "init"): lambda _, ended: "\n[defaults]\n" in ended.last["text"],
    ("help",): lambda _, ended: "Protect:" in ended.last["text"],
    ("config", "check"): lambda _, ended: ended.last["settings"] == 0,
    ("spark", "pack"): packed,
    ("version",): lambda _, ended: ended.last["message_type"] == "version",
}


def with_more(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """See `prepared`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(world.folder / "state-home"))
    # All packages are a quarter of a gigabyte: test_spark_cluster.py packs those.
    few = [each for each in pack._closure() if each.metadata["Name"] in {"tikv-br-core", "tikv-br", "xxhash"}]
    monkeypatch.setattr(pack, "_closure", lambda: few)
    txns = Txns(world.source, prefix_of(world.source))
    txns.commit(txns.prewrite(b"txn"), b"txn")
    begun = Path(world.names["begun"])
    (begun / "tikv-br" / "lease").mkdir(parents=True)
    (begun / "backup.lock").write_bytes(manifest.LOCK_TEXT)
    over = Lease("0" * 16, LeaseOwner("elsewhere", "", 1, 1), "", "backup", expires_ms=1)
    left = begun / "tikv-br" / "lease" / "00000001.json"
    left.write_bytes(dump(over))
    os.utime(left, (1, 1))  # it is over by the storage's clock, too
    return world
