"""One pass over a file for rows and hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.tasks.task import TaskContext, TaskMessage
from tikv_br.verify.checks import FileJob, HashedFile, check_part
from tikv_br.verify.options import Level


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12))
def test_any_order_of_reads_gives_the_hash_of_the_whole(
    tmp_path: Path, data: bytes, reads: list[tuple[int, int]]
) -> None:
    """Reads that jump, overlap or repeat return the right bytes, and the hash is that of the file, each byte once."""
    (tmp_path / "object.sst").write_bytes(data)
    counted: list[int] = []
    sst = HashedFile(open_store(parse(str(tmp_path))), FileEntry("object.sst", 0, b"", b"", 0, 0, 0), counted.append)
    for offset, length in reads:
        start = min(offset, len(data))
        end = min(start + length, len(data))
        assert sst.read_at(start, end - start) == data[start:end]
    assert sst.digest() == hashlib.sha256(data).digest()
    assert sum(counted) == len(data)


def check(folder: Path, file: FileEntry, level: Level = Level.FILES) -> list[tuple[str, Level]]:
    """Check one file of a V1 backup."""
    messages: list[TaskMessage] = []
    job = FileJob(open_store(parse(str(folder))), ApiVersion.V1, KeyMode.RAW, level, expiry_recorded=False, backup_ts=0)
    report = check_part(job, FilePair(file), TaskContext(0, 0, messages.append))
    return [(finding.cause, finding.level) for finding in report.findings]


def entry(data: bytes, **changes: object) -> FileEntry:
    """The record of a file of those bytes."""
    fields = {"sha256": hashlib.sha256(data).digest(), **changes}
    return FileEntry("object.sst", len(data), b"", b"", 0, 0, 0, **fields)  # type: ignore[arg-type]


def test_an_object_that_vanishes_after_the_listing_is_a_finding(tmp_path: Path) -> None:
    """Somebody deletes while we look: damage, not a broken storage."""
    assert check(tmp_path, entry(b"data")) == [("was removed during the check", Level.FILES)]


def test_a_file_without_recorded_hash_is_not_called_right(tmp_path: Path) -> None:
    """Files that cannot be checked are reported."""
    (tmp_path / "object.sst").write_bytes(b"data")
    assert check(tmp_path, entry(b"data")) == []
    [(cause, _level)] = check(tmp_path, entry(b"data", sha256=b""))
    assert "no recorded sha256" in cause


def test_a_wrong_record_of_the_tail_is_found(tmp_path: Path) -> None:
    """A restore would refuse the file by the hash of its last part, so it is wrong although its bytes are right."""
    (tmp_path / "object.sst").write_bytes(b"data")
    [(cause, level)] = check(tmp_path, entry(b"data", tail_sha256=bytes(32), tail_size=2))
    assert "has a checksum mismatch (sha256 of the last 2 bytes: expected 0000000000000000…, found " in cause
    assert level is Level.FILES


def test_bytes_and_rows_are_both_reported(tmp_path: Path) -> None:
    """A file that is neither the recorded one nor an SST says both, the plainer first."""
    (tmp_path / "object.sst").write_bytes(b"x" * 100)
    found = check(tmp_path, entry(b"y" * 100), Level.DATA)
    assert [level for _cause, level in found] == [Level.FILES, Level.DATA]
    assert "sha256" in found[0][0]
    assert "is damaged" in found[1][0]
