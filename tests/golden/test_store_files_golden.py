"""Records of files that real stores wrote, against the rows that were recorded with them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.integration.backup.reading import golden_rows
from tikv_br.backup import store as store_task
from tikv_br.backup.store import FileRecorder
from tikv_br.backup.store_responses import StoredSst
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.convert import CONVERTED_TS, Converter
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
CASES = {"v1": (V1, V1), "v1_to_v2": (V1, V2), "v1ttl": (V1TTL, V1TTL), "v1ttl_to_v2": (V1TTL, V2), "v2": (V2, V2)}


def recorder(name: str, *, source_sums: bool = False, expiry_in_properties: bool = True) -> FileRecorder:
    """Return the recorder of a recorded backup's conversion."""
    source, target = CASES[name]
    converter = Converter(KeyCodec(source), KeyCodec(target), 0)
    return FileRecorder(converter, source.has_ttl, source_sums, expiry_in_properties)


def backup_of(golden: Path, name: str) -> BackupSet:
    """Open a recorded backup."""
    return BackupSet.open(open_store(parse(f"local://{golden / 'backups' / name / 'data'}")))


def as_answered(kept: BackupSet, file: FileEntry) -> StoredSst:
    """Return what the store said of a file, which the Go tool put into its backupmeta as it came."""
    meta = brpb_pb2.BackupMeta.FromString(kept.store.get("backupmeta"))
    return StoredSst(file.name, next(said for said in meta.files if said.name == file.name))


def rows_of(file: FileEntry, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recorded rows in a file's range."""
    return [row for row in rows if file.start_key <= row["k"] and (not file.end_key or row["k"] < file.end_key)]


@pytest.mark.parametrize("name", CASES)
def test_timestamps_and_expiry_are_those_of_the_rows(golden: Path, name: str) -> None:
    """For every file: smallest and largest ts, and number, bytes and bounds of the rows that expire."""
    kept, rows = backup_of(golden, name), golden_rows(golden / "backups" / name)
    expiring = 0
    for file in kept.files:
        entry, _ = recorder(name).record(kept.store, as_answered(kept, file))
        own = rows_of(file, rows)
        assert len(own) == file.total_kvs
        timestamps = [row.get("ts", 0) for row in own]
        assert (entry.min_ts, entry.max_ts) == (min(timestamps), max(timestamps))
        limited = [row for row in own if row["e"]]
        expiries = [row["e"] for row in limited] or [0]
        assert entry.expiry.total_kvs == len(limited)
        assert entry.expiry.total_bytes == sum(len(row["k"]) + len(row["v"]) for row in limited)
        assert (entry.expiry.earliest, entry.expiry.latest) == (min(expiries), max(expiries))
        expiring += len(limited)
        data = (golden / "backups" / name / "data" / file.name).read_bytes()
        assert entry.tail_sha256 == hashlib.sha256(data[-entry.tail_size :]).digest()
        assert structs.replace(entry, tail_sha256=b"", tail_size=0, min_ts=0, max_ts=0, expiry=Expiry()) == file
    assert bool(expiring) == CASES[name][0].has_ttl


def test_files_of_conversions_are_counted_in_the_source_s_form(golden: Path) -> None:
    """The sums of the rows without the prefix are those that the V1 cluster gave for itself."""
    kept = backup_of(golden, "v1_to_v2")
    total = Checksum()
    for file in kept.files:
        _, source = recorder("v1_to_v2", source_sums=True).record(kept.store, as_answered(kept, file))
        total += source
    origin = backup_of(golden, "v1")
    said = [recorder("v1").record(origin.store, as_answered(origin, file))[1] for file in origin.files]
    assert total == sum(said, Checksum())


@pytest.mark.parametrize("name", ["v1ttl", "v2"])
def test_a_store_s_notes_say_what_reading_does(golden: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted properties equal the result of reading all rows; and at least one file need not be read."""
    kept = backup_of(golden, name)
    noted = 0
    for file in kept.files:
        contents = store_task._contents_by_properties(table_of(golden, name, file), CASES[name][0])
        if contents is None:
            continue
        noted += 1
        with monkeypatch.context() as patch:
            patch.setattr(store_task, "_contents_by_properties", lambda _table, _version: None)
            entry, _ = recorder(name).record(kept.store, as_answered(kept, file))
        assert (contents.min_ts, contents.max_ts, contents.expiry) == (entry.min_ts, entry.max_ts, entry.expiry)
    assert noted or all(rows_expire(file, golden, name) for file in kept.files)


def test_a_file_that_is_not_read_loads_no_arrow(golden: Path) -> None:
    """A task that only steers stores spares half a second of imports, and 150 MiB."""
    file = next(
        file
        for file in backup_of(golden, "v2").files
        if store_task._contents_by_properties(table_of(golden, "v2", file), V2) is not None
    )
    program = f"""
import pathlib, sys
from tests.golden.test_store_files_golden import as_answered, backup_of, recorder

kept = backup_of(pathlib.Path({str(golden)!r}), "v2")
already = set(sys.modules)
recorder("v2").record(kept.store, as_answered(kept, next(file for file in kept.files if file.name == {file.name!r})))
print([name for name in ("numba", "numpy", "pyarrow") if name in sys.modules and name not in already], "numba" in already)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[] False"


def table_of(golden: Path, name: str, file: FileEntry) -> Table:
    """Open a recorded file."""
    return Table(MemorySource((golden / "backups" / name / "data" / file.name).read_bytes()))


def rows_expire(file: FileEntry, golden: Path, name: str) -> bool:
    """Return whether any row of a file has an expiry."""
    return any(row["e"] for row in rows_of(file, golden_rows(golden / "backups" / name)))


def test_a_file_that_is_not_as_its_store_said_is_refused(golden: Path) -> None:
    """Other sums, another size."""
    kept = backup_of(golden, "v1ttl_to_v2")
    written = as_answered(kept, kept.files[0])
    for field, value in (("crc64xor", 1), ("total_kvs", 1), ("size", 17)):
        wrong = brpb_pb2.File()
        wrong.CopyFrom(written.file)
        setattr(wrong, field, value)
        with pytest.raises(BackupDamaged, match=written.name):
            recorder("v1ttl_to_v2").record(kept.store, StoredSst(written.name, wrong))


def test_a_file_that_cannot_be_seen_from_here(golden: Path) -> None:
    """The stores' folder is another one than ours: said so, with the way out."""
    kept = backup_of(golden, "v1")
    with pytest.raises(StorageObjectMissing, match="cannot find it") as raised:
        recorder("v1").record(kept.store, StoredSst("sst/x/0/1/1_default.sst", as_answered(kept, kept.files[0]).file))
    assert "--engine scan" in raised.value.hint


def test_rows_converted_from_v1_carry_the_ts_that_stores_give_them(golden: Path) -> None:
    """It is recorded without reading a row."""
    kept = backup_of(golden, "v1_to_v2")
    entry, _ = recorder("v1_to_v2").record(kept.store, as_answered(kept, kept.files[0]))
    assert (entry.min_ts, entry.max_ts) == (CONVERTED_TS, CONVERTED_TS)
