"""Exports of playgrounds and of tikv-br's backups, read by pyarrow, Python's csv and json, Spark and `raw import`."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from tests.e2e.command import environment
from tests.integration.backup.data import hard_rows
from tests.integration.backup.loaded import YEAR, Loaded, Sources, expiring, fill
from tests.integration.s3_servers import BUCKET, versitygw_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.openssl import crypter
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.dataflow import plan
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import CrypterMismatch, LeaseHeld, NothingMatched, StorageConflict, UsageError
from tikv_br.export.run import ExportOptions, ExportSummary, export
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.keys.text import parse_key
from tikv_br.incremental.backup import back_up_changes
from tikv_br.load.loader import load_pairs, open_source
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks import session
from tikv_br.tasks.session import spark_context

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
ROWS = hard_rows(count=300)
SALES = 7
"""A keyspace of the V2 cluster besides the default one."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    """A function to a cluster of an API version, in six regions, with rows that expire where there are such."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def get(version: ApiVersion) -> Loaded:
            folder = tmp_path_factory.mktemp(version.label)
            found = fill(stack.enter_context(live_cluster(folder, version, stores=1)), version, ROWS)
            if version is V2:
                found.live.raw(SALES).batch_put({b"sale%d" % number: b"\xff%d" % number for number in range(50)})
            return found

        yield get


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for each region or file, however small."""
    monkeypatch.setattr(plan, "SMALLEST_TASK", 1)


def exported(live: LiveCluster, place: str | Path | StorageLocation, **more: Any) -> ExportSummary:  # noqa: ANN401
    """Export a cluster on two threads; ``more`` is of `ExportOptions`, or of `BackupOptions`."""
    own = {name: more.pop(name) for name in ("backup", "format", "encoding", "overwrite") if name in more}
    location = place if isinstance(place, StorageLocation) else parse(str(place))
    usual: dict[str, Any] = {"executor": "driver", "concurrency": 2, **more}
    return export(ExportOptions(BackupOptions(live.config, location, **usual), **own))


def read_text(folder: Path, form: str) -> list[dict[str, Any]]:
    """The rows of all parts, by Python's readers; only the form of keys and values is undone."""
    csv.field_size_limit(1 << 30)
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("part-*")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file, strict=True) if path.suffix == ".csv" else map(json.loads, file)
    return [row | {name: parse_key(row[name], form) for name in ("key", "value")} for row in rows]


def pairs(rows: list[dict[str, Any]]) -> dict[bytes, bytes]:
    """Keys and values; each key once."""
    found = {row["key"]: row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def check_expiries(rows: list[dict[str, Any]], at: float) -> None:
    """A year after ``at`` for the rows with a TTL, null for the others."""
    for row in rows:
        if row["key"] in expiring():
            assert abs(int(row["expire_ts"]) - at - YEAR) < 30
        else:
            assert not row["expire_ts"]


@pytest.mark.parametrize("version", [pytest.param(V1, marks=pytest.mark.core("export")), V1TTL, V2])
def test_parquet_of_a_cluster(version: ApiVersion, loaded: Sources, tmp_path: Path) -> None:
    """An export has exactly the rows that a client reads, with expiries, in several parts; the export is marked complete."""
    live = loaded(version).live
    done = exported(live, tmp_path / "out")
    table = ds.dataset(tmp_path / "out").to_table()
    assert tuple(table.column_names) == done.columns == ("key", "value", "expire_ts")[: 3 if version.has_ttl else 2]
    rows = table.to_pylist()
    assert pairs(rows) == contents(live)
    if version.has_ttl:
        check_expiries(rows, loaded(version).at)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["_SUCCESS", "_export.json", *(f"part-{number:05d}.parquet" for number in range(done.files))]
    assert done.files > 1
    said = json.loads((tmp_path / "out" / "_export.json").read_text())["content"]
    assert (said["total_kvs"], said["cluster_id"]) == (len(rows), live.cluster.cluster_id)
    assert sum(each["rows"] for each in said["files"]) == done.total_kvs == len(rows)


@pytest.mark.parametrize(("kind", "form"), [("csv", "hex"), ("jsonl", "escaped")])
def test_text_of_a_cluster(kind: str, form: str, loaded: Sources, tmp_path: Path) -> None:
    """Python's csv and json find the same."""
    live = loaded(V2).live
    exported(live, tmp_path / "out", format=kind, encoding=form)
    rows = read_text(tmp_path / "out", form)
    assert pairs(rows) == contents(live)
    check_expiries(rows, loaded(V2).at)


def test_part_of_a_keyspace_without_requests_for_ttls(loaded: Sources, tmp_path: Path) -> None:
    """One keyspace, two ranges, no column for the expiry."""
    live = loaded(V2).live
    ranges = (KeyRange(b"sale1", b"sale15"), KeyRange(b"sale3", b"sale4"))
    ttls = live.fail("RawGetKeyTTL", {"delay": {"seconds": 0}}, count=-1)
    exported(live, tmp_path / "out", keyspaces=(str(SALES),), ranges=ranges, assume_no_ttl=True)
    assert live.hits(ttls) == 0
    live.relent(ttls)
    table = ds.dataset(tmp_path / "out").to_table()
    assert table.column_names == ["key", "value"]
    expected = {
        key: value
        for key, value in contents(live, SALES).items()
        if any(span.start <= key < span.end for span in ranges)
    }
    assert pairs(table.to_pylist()) == expected
    assert expected


@pytest.mark.parametrize(
    ("kind", "form"), [("parquet", None), ("csv", "hex"), ("csv", "escaped"), ("jsonl", "escaped"), ("jsonl", None)]
)
def test_raw_load_reads_it(kind: str, form: str | None, loaded: Sources, tmp_path: Path) -> None:
    """Rows and TTLs come back through `raw import`, the large ones too, with the form that it assumes by default."""
    live = loaded(V1TTL).live
    before = contents(live)
    exported(live, tmp_path / "out", format=kind, encoding=form)
    live.raw().delete_range(EVERY_KEY)
    for path in sorted((tmp_path / "out").glob("part-*")):
        load_pairs(live.raw().column_writer(), open_source(path, form), ttl=0, concurrency=4)
    assert contents(live) == before
    left = live.raw().get_ttl(b"ttl0007")
    assert left is not None
    assert YEAR - 600 < left <= YEAR + 10


@pytest.mark.slow
def test_spark_runs_it_and_spark_reads_it(loaded: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks on Spark write it; DataFrames of all three formats have the rows."""
    from pyspark.sql import SparkSession

    live = loaded(V1).live
    for kind in ("csv", "jsonl"):
        exported(live, tmp_path / kind, format=kind, encoding="hex")
    with spark_context("local[2]") as context:
        monkeypatch.setattr(session, "spark_context", lambda *_, **__: contextlib.nullcontext(context))
        done = exported(live, tmp_path / "parquet", executor="spark", spark_master="local[2]")
        assert (done.executor, done.files > 1) == ("spark", True)
        read = SparkSession(context).read
        rows = read.parquet(str(tmp_path / "parquet")).collect()
        assert pairs([{"key": bytes(row.key), "value": bytes(row.value)} for row in rows]) == contents(live)
        for frame in (
            read.option("header", True).csv(str(tmp_path / "csv")),
            read.json(str(tmp_path / "jsonl")),
        ):
            texts = frame.select("key", "value").collect()
            found = [{"key": bytes.fromhex(row.key), "value": bytes.fromhex(row.value or "")} for row in texts]
            assert pairs(found) == contents(live)


def test_encrypted_backup(loaded: Sources, tmp_path: Path) -> None:
    """With the key the export is plain; without it nothing is written."""
    live = loaded(V1).live
    place = StorageLocation("local", str(tmp_path / "backup"), crypter=crypter("aes256-ctr"))
    backup(BackupOptions(live.config, place, executor="driver", file_bytes=20_000))
    with pytest.raises(CrypterMismatch):
        exported(live, tmp_path / "out", backup=parse(place.path))
    assert not (tmp_path / "out").exists()
    done = exported(live, tmp_path / "out", backup=place)
    assert done.files > 1
    assert pairs(ds.dataset(tmp_path / "out").to_table().to_pylist()) == contents(live)


@pytest.mark.slow
def test_chain_of_incremental_backups(tmp_path: Path) -> None:
    """The newest increment stands for its whole chain: changed, deleted, new and expired rows are as they were then."""
    with live_cluster(tmp_path / "v2", V2, stores=1) as live:
        raw = live.raw()
        places = [parse(str(tmp_path / name)) for name in ("full", "monday", "tuesday")]
        made = [BackupOptions(live.config, place, executor="driver", safe_interval=0.0) for place in places]
        raw.batch_put({b"key%03d" % number: b"first" for number in range(100)})
        backup(made[0])
        raw.batch_put({b"key%03d" % number: b"second" for number in range(0, 100, 3)})
        raw.batch_delete([b"key%03d" % number for number in range(1, 100, 3)])
        back_up_changes(made[1], places[0])
        raw.put(b"new", b"third")
        raw.put(b"long", b"stays", ttl=5000)
        raw.put(b"short", b"expires", ttl=1)
        time.sleep(2.1)
        back_up_changes(made[2], places[1])
        expected = contents(live)
        raw.delete_range(EVERY_KEY)
        done = exported(live, tmp_path / "out", backup=places[2])
    rows = ds.dataset(tmp_path / "out").to_table().to_pylist()
    assert pairs(rows) == expected
    assert [row["key"] for row in rows if row["expire_ts"]] == [b"long"]
    assert all(row["ts"] for row in rows)
    assert done.columns == ("key", "value", "expire_ts", "ts")


def test_destination_with_something_is_refused(loaded: Sources, tmp_path: Path) -> None:
    """Foreign files always, an earlier export unless it is to be replaced; nothing changes."""
    live, place = loaded(V1).live, tmp_path / "out"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StorageConflict, match=r"notes\.txt does not belong to an export"):
            exported(live, place, overwrite=overwrite)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    (place / "notes.txt").unlink()
    first = exported(live, place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(StorageConflict, match="an earlier export"):
        exported(live, place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    exported(live, place, overwrite=True, format="jsonl", ranges=(KeyRange(b"row00010", b"row00012"),))
    assert pairs(read_text(place, "hex")) == {key: ROWS[key] for key in (b"row00010", b"row00011")}
    assert not list(place.glob("*.parquet"))
    assert first.files > 1


def test_ranges_without_a_row_are_refused(loaded: Sources, tmp_path: Path) -> None:
    """For a cluster and a backup; an earlier export stays, and --allow-empty writes an empty one."""
    live, place = loaded(V1).live, tmp_path / "out"
    first = exported(live, place, format="jsonl")
    copied = parse(str(tmp_path / "backup"))
    backup(BackupOptions(live.config, copied, executor="driver"))
    for source in (None, copied):
        with pytest.raises(NothingMatched, match="hex:6e6f"):
            exported(live, place, overwrite=True, backup=source, ranges=(KeyRange(b"no", b"np"),))
    assert len(pairs(read_text(place, "hex"))) == first.total_kvs
    assert exported(live, tmp_path / "none", allow_empty=True, ranges=(KeyRange(b"no", b"np"),)).total_kvs == 0


def test_failure_leaves_nothing(loaded: Sources, tmp_path: Path) -> None:
    """A key that is no text ends the export; finished parts are removed."""
    live = loaded(V1).live
    with pytest.raises(UsageError, match="not valid UTF-8"):
        exported(live, tmp_path / "out", format="csv", concurrency=1)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_killed_export_is_not_complete(loaded: Sources, tmp_path: Path) -> None:
    """SIGKILL after the first part: no _SUCCESS. A second run does not wait; it refuses, or replaces it on request."""
    live, place = loaded(V1).live, tmp_path / "out"
    script = (
        "import sys; from tikv_br.dataflow import plan; plan.SMALLEST_TASK = plan.REGION_OVERHEAD; "
        "from tikv_br.cli.main import run; sys.exit(run())"
    )
    flags = ["--pd", live.pd, "-s", str(place), "--executor", "driver", "--concurrency", "1"]
    slow = live.fail("RawScan", {"delay": {"seconds": 0.3}}, count=-1)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", script, "export", "raw", *flags],
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd=Path(__file__).resolve().parents[3],
        ) as process:
            eventually(lambda: list(place.glob("part-*.parquet")))
            with pytest.raises(LeaseHeld):
                exported(live, place)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    finally:
        live.relent(slow)
    assert not (place / "_SUCCESS").exists()
    with pytest.raises(StorageConflict, match="an unfinished export"):
        exported(live, place)
    exported(live, place, overwrite=True)
    assert pairs(ds.dataset(place).to_table().to_pylist()) == contents(live)
    assert {path.name[:5] for path in place.iterdir()} == {"_SUCC", "_expo", "part-"}


@pytest.mark.slow
def test_to_a_real_s3_server(loaded: Sources, tmp_path: Path) -> None:
    """From a cluster and from a backup on S3; boto3 lists the parts, and pyarrow reads them as downloaded."""
    live = loaded(V2).live
    with versitygw_server(tmp_path / "s3") as server:
        exported(live, server.location("lake/live"))
        backup(BackupOptions(live.config, server.location("backup"), executor="driver", engine="scan"))
        done = exported(live, server.location("lake/copy"), backup=server.location("backup"))
        assert "secret" not in done.source + done.storage
        for prefix in ("lake/live/", "lake/copy/"):
            listed = server.admin.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
            names = {each["Key"].removeprefix(prefix) for each in listed}
            assert {"_SUCCESS", "_export.json", "part-00000.parquet"} <= names
            assert not [name for name in names if "/" in name]
            for name in names:
                (tmp_path / prefix).mkdir(parents=True, exist_ok=True)
                server.admin.download_file(BUCKET, prefix + name, str(tmp_path / prefix / name))
            assert pairs(ds.dataset(tmp_path / prefix).to_table().to_pylist()) == contents(live)
