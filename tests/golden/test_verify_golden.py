"""Verification of what real servers wrote, and of what a careful hand makes of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tools import GOLDEN_BACKUPS
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged
from tikv_br.storage.url import parse
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import VerifySummary, verify

Meta = brpb_pb2.BackupMeta
FILE_LEVELS = (Level.META, Level.FILES, Level.DATA)


def run(folder: Path, level: Level) -> VerifySummary:
    """Verify on threads."""
    return verify(VerifyOptions(parse(f"local://{folder}"), level, executor="driver"))


@pytest.mark.parametrize("level", FILE_LEVELS)
@pytest.mark.parametrize("name", GOLDEN_BACKUPS)
def test_real_backups_pass(golden: Path, name: str, level: Level) -> None:
    """Nothing that the Go tool and its stores wrote is found wrong; as many rows are read as were recorded beside it."""
    folder = golden / "backups" / name
    recorded = json.loads((folder / "meta.json").read_text())["backupmeta"]["files"]
    summary = run(folder / "data", level)
    assert summary.files == len(recorded)
    assert summary.files_checked == (0 if level is Level.META else len(recorded))
    assert summary.rows_checked == (sum(int(file["total_kvs"]) for file in recorded) if level is Level.DATA else 0)
    assert summary.foreign_objects == 0


@pytest.fixture(params=["v1ttl", "v2"])
def copied(golden: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a real backup, whose `backupmeta` carries no seal, to damage."""
    target = tmp_path / "backup"
    shutil.copytree(golden / "backups" / request.param / "data", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def edit(folder: Path, change: Callable[[Meta], None]) -> str:
    """Change `backupmeta`; the name of the file that `largest` is."""
    path = folder / "backupmeta"
    meta = Meta.FromString(path.read_bytes())
    change(meta)
    path.write_bytes(meta.SerializeToString())
    return largest(meta).name


def largest(meta: Meta) -> brpb_pb2.File:
    """The record of the largest file."""
    return max(meta.files, key=lambda file: file.size)


def found(folder: Path, level: Level) -> list[Finding]:
    """Findings of a verification."""
    findings: list[Finding] = []
    with pytest.raises(BackupDamaged):
        verify(VerifyOptions(parse(f"local://{folder}"), level, executor="driver"), on_finding=findings.append)
    return findings


def more_rows(meta: Meta) -> None:
    """One row too many."""
    largest(meta).total_kvs += 1


def more_bytes(meta: Meta) -> None:
    """One byte too many."""
    largest(meta).total_bytes += 1


def other_checksum(meta: Meta) -> None:
    """One bit of the checksum."""
    largest(meta).crc64xor ^= 1 << 40


def later_start(meta: Meta) -> None:
    """A range that begins after the first row."""
    largest(meta).start_key += b"\xff" * 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (more_rows, "rows"),
        (more_bytes, "bytes of keys and values"),
        (other_checksum, "checksum"),
        (later_start, "before the start of the range"),
    ],
)
def test_wrong_records_of_rows_are_found_at_level_data(
    copied: Path, change: Callable[[Meta], None], words: str
) -> None:
    """The rows of the file are counted: no lower level can find this, and none claims to."""
    victim = edit(copied, change)
    run(copied, Level.FILES)
    findings = found(copied, Level.DATA)
    assert {finding.object for finding in findings} == {victim}
    assert {finding.level for finding in findings} == {Level.DATA}
    assert any(words in finding.cause for finding in findings)


@pytest.mark.parametrize("part", range(1, 8))
def test_damage_that_was_hashed_is_found_at_level_data(copied: Path, part: int) -> None:
    """A byte went wrong before the backup's writer took the sha256: the checksums inside the file tell.

    Seven places over the data blocks of the largest file.
    """

    def damage(meta: Meta) -> None:
        path = copied / largest(meta).name
        data = bytearray(path.read_bytes())
        data[len(data) * part // 16] ^= 1
        path.write_bytes(data)
        largest(meta).sha256 = hashlib.sha256(data).digest()

    victim = edit(copied, damage)
    run(copied, Level.FILES)
    assert [(finding.object, finding.level) for finding in found(copied, Level.DATA)] == [(victim, Level.DATA)]


def test_a_neighbour_s_rows_are_found_at_level_data(copied: Path) -> None:
    """Two files swapped, and hashes and lengths with them: each holds rows that are not of its range."""
    names: list[str] = []

    def swap(meta: Meta) -> None:
        one, other = sorted(meta.files, key=lambda file: file.start_key)[1:3]
        names.extend((one.name, other.name))
        one.sha256, other.sha256 = other.sha256, one.sha256
        one.size, other.size = other.size, one.size
        first, second = (copied / name for name in names)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    edit(copied, swap)
    run(copied, Level.FILES)
    assert {finding.object for finding in found(copied, Level.DATA)} == set(names)


def test_a_claimed_overlap_is_found_at_level_meta(copied: Path) -> None:
    """A range that reaches into the next file's."""

    def widen(meta: Meta) -> None:
        first, second = sorted(meta.files, key=lambda file: file.start_key)[:2]
        first.end_key = second.start_key + b"\0"

    edit(copied, widen)
    [finding] = found(copied, Level.META)
    assert "overlaps" in finding.cause
