from __future__ import annotations

import hashlib
from pathlib import Path
from unittest import mock

import pytest

from tikv_br.backup.store import TAIL_READS, read_tail
from tikv_br.backupset.files import TAIL_SIZE
from tikv_br.errors import StorageUnreachable
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.url import parse

SMALL, LARGE = bytes(range(100)), b"begin" + bytes(range(256)) * (TAIL_SIZE // 256)


def read(folder: Path, data: bytes, *answers: bytes | None) -> tuple[bytes, int]:
    """The end of a file whose first reads give these bytes (None: those that it has), and how often it was read."""
    store = LocalObjectStore(parse(f"local://{folder}"))
    store.put("file", data)
    truth = store.get_range("file", max(len(data) - TAIL_SIZE, 0), TAIL_SIZE)
    reads = [truth if answer is None else answer for answer in (*answers, *[None] * TAIL_READS)]
    with mock.patch.object(LocalObjectStore, "get_range", side_effect=reads) as reading:
        return read_tail(store, "file", len(data), hashlib.sha256(data).digest()), reading.call_count


@pytest.mark.parametrize("data", [SMALL, LARGE])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_bytes_altered_on_their_way_are_not_recorded(tmp_path: Path, data: bytes, damage: str) -> None:
    """The record matches the stored bytes: a read that is cut or altered is detected by another one."""
    tail = data[-TAIL_SIZE:]
    bad = tail[:-3] if damage == "cut" else tail[:7] + b"?" + tail[8:]
    assert read(tmp_path, data, bad)[0] == tail
    assert read(tmp_path, data, None, bad)[0] == tail


def test_a_file_that_is_read_whole_is_read_once(tmp_path: Path) -> None:
    """Its store's hash proves it; of a larger one two reads must agree."""
    assert read(tmp_path, SMALL)[1] == 1
    assert read(tmp_path, LARGE)[1] == 2


def test_two_short_reads_do_not_agree(tmp_path: Path) -> None:
    """Bytes that are missing each time are no end of a file."""
    assert read(tmp_path, LARGE, b"short", b"short")[0] == LARGE[-TAIL_SIZE:]


def test_changing_reads_fail_the_task(tmp_path: Path) -> None:
    """The error advises another try; no hash of arbitrary bytes is recorded."""
    with pytest.raises(StorageUnreachable, match="different on each read"):
        read(tmp_path, LARGE, *(b"%d" % number for number in range(TAIL_READS)))
