"""The Go tool's `backupmeta`, which nothing guards: what is found of damage to it, and what the rest can and cannot do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from google.protobuf.message import Message

from tests.support.damage import FLIPS, flipped
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupSetError
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

UNGUARDED = {"br_version", "cluster_id", "cluster_version", "ddls", "end_version", "start_version", "files.cipher_iv"}
"""Say nothing of the rows."""
BOUNDS = {"files.start_key", "files.end_key", "raw_ranges.start_key", "raw_ranges.end_key"}
"""Another bound is found once a row lies outside of it, or two files share a key."""


def refusal(folder: Path, findings: list[Finding] | None = None) -> BackupSetError | None:
    """Error of a verification that reads every row."""
    options = VerifyOptions(parse(f"local://{folder}"), Level.DATA, executor="driver")
    try:
        verify(options, on_finding=([] if findings is None else findings).append)
    except BackupSetError as error:
        return error
    return None


def different(one: Message, other: Message, path: str = "") -> set[str]:
    """The fields, dotted, in which two messages are not the same."""
    found: set[str] = set()
    for field in one.DESCRIPTOR.fields:
        before, after = getattr(one, field.name), getattr(other, field.name)
        if before == after:
            continue
        if field.message_type is not None and len(before) == len(after):
            for pair in zip(before, after, strict=True):
                found |= different(*pair, path=f"{path}{field.name}.")
        else:
            found.add(path + field.name)
    return found


def test_undetected_flips_lose_no_row(copied: Path) -> None:
    """Flipped bits that reading every row does not detect are in fields that do not affect rows."""
    path, chance, found = copied / "backupmeta", random.Random(20), 0
    data = path.read_bytes()
    sound = BackupSet.open(open_store(parse(f"local://{copied}")))
    assert refusal(copied) is None
    for _ in range(FLIPS):
        damaged = flipped(data, chance)
        path.write_bytes(damaged)
        error = refusal(copied)
        found += error is not None
        if error is None:
            changed = different(brpb_pb2.BackupMeta.FromString(data), brpb_pb2.BackupMeta.FromString(damaged))
            assert changed <= UNGUARDED | BOUNDS, changed
            now = BackupSet.open(open_store(parse(f"local://{copied}")))
            assert (now.totals, len(now.files)) == (sound.totals, len(sound.files))
        elif isinstance(error, BackupDamaged):
            assert error.exit_code == 32
    assert found > FLIPS // 2


@pytest.mark.parametrize("damage", ["empty", "truncated", "short of a byte", "swapped", "a file less"])
def test_cut_and_exchanged_metadata_is_detected(copied: Path, damage: str) -> None:
    """Also a file whose entry has become one of an unknown field: its loss is reported."""
    path = copied / "backupmeta"
    data = path.read_bytes()
    neighbour = max(copied.rglob("*.sst"))
    entry = brpb_pb2.BackupMeta.FromString(data).files[0].SerializeToString()
    at = data.index(entry)
    tag = data.rindex(b"\x22", 0, at)  # field 4, of bytes
    cut = data[: random.Random(1).randrange(1, len(data))]
    path.write_bytes(
        {
            "empty": b"",
            "truncated": cut,
            "short of a byte": data[:-1],
            "swapped": neighbour.read_bytes(),
            "a file less": data[:tag] + b"\x3a" + data[tag + 1 :],  # field 7
        }[damage]
    )
    findings: list[Finding] = []
    error = refusal(copied, findings)
    assert isinstance(error, BackupSetError)
    assert error.exit_code in {32, 35}
    assert "backupmeta" in error.message + "".join(each.object for each in findings)
    path.unlink()
    assert isinstance(refusal(copied), BackupNotFound)
