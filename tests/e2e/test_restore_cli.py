"""Restore as a user runs it: over a real S3 server and back, and every wrong input with its own exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.integration.s3_servers import SECRET_KEY, versitygw_server
from tests.support.documented import checked
from tests.support.live_cluster import LiveCluster, live_cluster, make_keyspaces
from tests.support.program import run_program
from tikv_br import errors
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.restore.record import RestoreCheckpoint, RestoreRecord
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = hard_rows(count=300)


def tikv_br(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run the command line in JSON form, without a terminal."""
    done = run_program([*arguments, "--output", "json"], environment=os.environ, timeout=timeout)
    return checked([*arguments, "json"], done)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the last JSON line of stdout."""
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V1 cluster with rows that are hard on codecs."""
    with live_cluster(tmp_path_factory.mktemp("v1"), ApiVersion.V1, regions=4) as live:
        load(live, ROWS)
        yield live


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """An empty V2 cluster."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2) as live:
        yield live


@pytest.fixture(scope="module")
def backup(v1: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V1 backup on disk."""
    folder = tmp_path_factory.mktemp("backup") / "v1"
    done = tikv_br("backup", "raw", "-u", v1.pd, "-s", f"local://{folder}", "--executor", "driver")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.slow
def test_round_trip_over_a_real_s3_server(v1: LiveCluster, tmp_path: Path) -> None:
    """V1 to V2 and back in, both by Spark, through versitygw: the stores fetch from it, all rows are there, no secret is shown."""
    with (
        versitygw_server(tmp_path / "s3") as s3,
        live_cluster(tmp_path / "target", ApiVersion.V2, stores=3) as target,
    ):
        url = s3.url("drills/first")
        made = tikv_br(
            *("backup", "raw", "-u", v1.pd, "-s", url, "--dst-api-version", "v2", "--checksum", "--executor", "spark")
        )
        assert made.returncode == 0, made.stdout
        taken = tikv_br("restore", "raw", "-u", target.pd, "-s", url, "--executor", "spark")
        assert taken.returncode == 0, taken.stdout
        scanned = tikv_br("raw", "scan", "--pd", target.pd)
        summed = last_line(tikv_br("raw", "checksum", "--pd", target.pd))
    rows = [json.loads(line) for line in scanned.stdout.splitlines()]
    assert {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in rows} == ROWS
    for summary in (last_line(made), last_line(taken)):
        assert summary["message_type"] == "summary"
        assert summary["storage"].startswith(f"{url.split('?')[0]}?endpoint={s3.endpoint}")
        assert (summary["crc64xor"], summary["total_kvs"], summary["total_bytes"]) == (
            summed["crc64xor"],
            len(ROWS),
            summed["total_bytes"],
        )
    for said in (made, taken):
        assert SECRET_KEY not in said.stdout + said.stderr


def truncate(backup: Path) -> None:
    """Cut the largest file."""
    victim = largest(backup)
    victim.write_bytes(victim.read_bytes()[:-100])


def flip(backup: Path) -> None:
    """Change one bit of the largest file."""
    data = bytearray(largest(backup).read_bytes())
    data[len(data) // 2] ^= 4
    largest(backup).write_bytes(data)


def remove(backup: Path) -> None:
    """Lose the largest file."""
    largest(backup).unlink()


def edit_meta(backup: Path) -> None:
    """Leave one file out of backupmeta: all that is left of it would restore without a complaint."""
    path = backup / "backupmeta"
    meta = brpb_pb2.BackupMeta.FromString(path.read_bytes())
    del meta.files[0]
    path.write_bytes(meta.SerializeToString())


def largest(backup: Path) -> Path:
    """Return the largest SST."""
    return max(backup.rglob("*.sst"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", [truncate, flip, remove, edit_meta])
def test_damage_is_found_before_the_cluster_is_touched(
    backup: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Each kind of damage has the exit code of damage, names the object, and leaves the target empty."""
    copy = tmp_path / "copy"
    shutil.copytree(backup, copy)
    damage(copy)
    with live_cluster(tmp_path / "target", ApiVersion.V1) as target:
        done = tikv_br("restore", "-u", target.pd, "-s", f"local://{copy}")
        assert target.raw().checksum().total_kvs == 0
    assert done.returncode == errors.BackupDamaged.exit_code
    assert last_line(done)["name"] == "BackupDamaged"
    assert (".sst" in last_line(done)["message"]) or ("backupmeta" in last_line(done)["message"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-u", "127.0.0.1:1"], errors.ClusterUnreachable),
        (["-u", "{v1}", "--start", "hex:xyz"], errors.UsageError),
        (["-u", "{v1}", "--start", "02", "--end", "01"], errors.UsageError),
        (["-u", "{v1}", "--ca", "/does/not/exist"], errors.UsageError),
        (["-u", "{v1}", "--file-check", "none"], errors.UsageError),
        (["-u", "{v2}"], errors.ApiVersionMismatch),
        (["-u", "{v1}", "--no-checksum"], errors.TargetNotEmpty),
        (["-u", "{v1}", "-s", "local:///does/not/exist"], errors.BackupNotFound),
        (["-u", "{v1}", "-s", "ftp://host/path"], errors.UsageError),
        (
            ["-u", "{v1}", "-s", "s3://bkt/p?endpoint=http://127.0.0.1:1&access-key=a&secret-access-key=b"],
            errors.StorageUnreachable,
        ),
    ],
)
def test_wrong_input_has_its_own_exit_code(
    v1: LiveCluster, v2: LiveCluster, backup: Path, arguments: list[str], error: type[errors.TikvBrError]
) -> None:
    """A sentence, a hint, and the exit code of the error's class; nothing is written."""
    filled = [argument.format(v1=v1.pd, v2=v2.pd) for argument in arguments]
    done = tikv_br("restore", "raw", *([] if "-s" in filled else ["-s", f"local://{backup}"]), *filled)
    said = last_line(done)
    assert (done.returncode, said["name"], said["code"]) == (error.exit_code, error.__name__, error.exit_code)
    assert said["message"]
    assert said["hint"]
    assert "Traceback" not in done.stderr
    assert v2.raw().checksum().total_kvs == 0


@pytest.mark.core("restore")
def test_a_part_moves_to_another_keyspace(v1: LiveCluster, v2: LiveCluster, tmp_path: Path) -> None:
    """The plan comes first, in full; the restore moves the keys of a prefix to another one, in another keyspace."""
    make_keyspaces(v2, 9)
    place = ["-s", f"local://{tmp_path / 'moving'}"]
    made = tikv_br("backup", "raw", "-u", v1.pd, *place, "--dst-api-version", "v2", "--executor", "driver")
    assert made.returncode == 0, made.stdout
    moving = ["-u", v2.pd, *place, "--to-keyspace", "9", "--rewrite-prefix", "hex:726f7730=\\x00new"]
    planned = tikv_br("restore", "raw", *moving, "--dry-run")
    assert planned.returncode == 0, planned.stdout
    plan = next(line for line in map(json.loads, planned.stdout.splitlines()) if line["message_type"] == "plan")
    assert plan["ranges"] == [
        {
            "start": "72000000726f7730",
            "end": "72000000726f7731",
            "target_start": "72000009006e6577",
            "target_end": "72000009006e6578",
        }
    ]
    assert sum(file["size"] for file in plan["files"]) == plan["size"]
    assert v2.raw(9).checksum().total_kvs == 0
    taken = tikv_br("restore", "raw", *moving)
    assert taken.returncode == 0, taken.stdout
    scanned = tikv_br("raw", "scan", "--pd", v2.pd, "--keyspace", "9")
    rows = [json.loads(line) for line in scanned.stdout.splitlines()]
    assert {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in rows} == {
        b"\0new" + key[4:]: value for key, value in ROWS.items() if key.startswith(b"row0")
    }


@pytest.mark.parametrize("rewrite", ["6f6c64", "61=62=63"])
def test_a_rewrite_that_is_none_is_refused(v2: LiveCluster, backup: Path, rewrite: str) -> None:
    """Two prefixes with a sign between, in the form of --key-format."""
    done = tikv_br("restore", "raw", "-u", v2.pd, "-s", f"local://{backup}", f"--rewrite-prefix={rewrite}")
    assert done.returncode == errors.UsageError.exit_code
    assert "--rewrite-prefix" in last_line(done)["message"]


def test_an_unfinished_restore_is_given_up(v1: LiveCluster, backup: Path) -> None:
    """Its records go and are counted; the finished backup stays, which a plain abort refuses to touch."""
    store = open_store(parse(f"local://{backup}"))
    RestoreRecord(store, "given-up").create_checkpoint(RestoreCheckpoint(cluster_id=1, empty=(), started_ms=1))
    place = ("-s", f"local://{backup}")
    assert tikv_br("backup", "abort", *place).returncode == errors.BackupPathInUse.exit_code
    done = tikv_br("backup", "abort", "--restores", *place, "-u", v1.pd)
    assert (done.returncode, last_line(done)["forgotten_restores"], last_line(done)["put_back"]) == (0, 1, False)
    assert list(store.list("tikv-br/restore")) == []
    assert tikv_br("verify", *place, "--level", "files").returncode == 0
