"""Backups of the Go TiKV-BR and of real stores: read field by field, verified, and written again the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from tikv_br.backupset import backupmeta, layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import require_disjoint
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

NAMES = (
    "v1",
    "v1_lz4",
    "v1_snappy",
    "v1_to_v2",
    "v1ttl",
    "v1ttl_to_v2",
    "v2",
    "v2_3stores",
    "v2_ks1_rpc",
    "v2_ks4242_rpc",
    "v2_ranged",
)


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, golden: Path) -> Path:
    """One recorded backup."""
    return golden / "backups" / str(request.param)


@pytest.fixture
def recorded(folder: Path) -> dict[str, Any]:
    """Record of the generator."""
    document: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    return document


def test_every_recorded_backup_is_tested(golden: Path) -> None:
    """No golden backup is forgotten."""
    assert {path.name for path in (golden / "backups").iterdir()} == set(NAMES)


def test_content_is_as_recorded(folder: Path, recorded: dict[str, Any]) -> None:
    """Every field of the meta and of each file is what the independent decoding in meta.json says."""
    expected = recorded["backupmeta"]
    opened = BackupSet.open(open_store(parse(str(folder / "data"))))
    assert opened.manifest is None
    assert opened.api_version == expected["api_version"]
    assert opened.api_version.label == recorded["dst_api"]
    assert (opened.cluster_id, opened.cluster_version) == (expected["cluster_id"], expected["cluster_version"])
    assert [{"start": part.start.hex(), "end": part.end.hex(), "cf": "default"} for part in opened.ranges] == expected[
        "raw_ranges"
    ]
    files = [
        {
            "name": file.name,
            "sha256": file.sha256.hex(),
            "start_key": file.start_key.hex(),
            "end_key": file.end_key.hex(),
            "crc64xor": file.crc64xor,
            "total_kvs": file.total_kvs,
            "total_bytes": file.total_bytes,
            "cf": "default",
            "size": file.size,
            "cipher_iv": file.cipher_iv.hex(),
            "start_version": 0,
            "end_version": 0,
        }
        for file in opened.files
    ]
    assert files == expected["files"]
    sums = opened.totals._asdict()
    assert sums.pop("size") == sum(file["size"] for file in expected["files"])
    assert sums == recorded["backupmeta_file_sums"]


def test_files_are_the_recorded_ones(folder: Path) -> None:
    """Presence, length and sha256 of every file of every backup hold; no two ranges overlap."""
    opened = BackupSet.open(open_store(parse(str(folder / "data"))))
    for file in opened.files:
        opened.verify_identity(file)
        opened.verify_content(file)
    require_disjoint(file.key_range for file in opened.files)


def test_written_meta_equals_the_go_tools(folder: Path) -> None:
    """A meta that we write for the same content has the same value in every field, set or not."""
    original = (folder / "data" / layout.META).read_bytes()
    ours = brpb_pb2.BackupMeta.FromString(backupmeta.encode(backupmeta.decode(original)))
    theirs = brpb_pb2.BackupMeta.FromString(original)
    assert _as_json(ours) == _as_json(theirs)
    assert ours == theirs


def _as_json(message: brpb_pb2.BackupMeta) -> dict[str, Any]:
    document: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def test_damage_to_a_recorded_backup_is_found(golden: Path, tmp_path: Path) -> None:
    """A cut, altered or missing SST and a cut meta of the Go tool are BackupDamaged with the object's name."""
    place = tmp_path / "copy"
    shutil.copytree(golden / "backups" / "v1_to_v2" / "data", place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    place.chmod(0o755)
    store = open_store(parse(str(place)))
    opened = BackupSet.open(store)
    cut, altered, missing = opened.files[:3]
    store.put(cut.name, store.get(cut.name)[:-1])
    data = bytearray(store.get(altered.name))
    data[len(data) // 2] ^= 1
    store.put(altered.name, bytes(data))
    store.delete(missing.name)
    with pytest.raises(BackupDamaged, match=cut.name):
        opened.verify_identity(cut)
    with pytest.raises(BackupDamaged, match=altered.name):
        opened.verify_content(altered)
    with pytest.raises(BackupDamaged, match=missing.name):
        opened.verify_identity(missing)
    store.put(layout.META, store.get(layout.META)[:-100])
    with pytest.raises(BackupDamaged, match="backupmeta"):
        BackupSet.open(store)
