from __future__ import annotations

import pytest
from msgspec import structs

from tests.unit.backupset.samples import describe
from tikv_br.backupset import layout, manifest
from tikv_br.backupset.manifest import RunRecord, differences
from tikv_br.backupset.sealed import write_record
from tikv_br.errors import BackupDamaged
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore


@pytest.fixture
def record(store: ObjectStore) -> RunRecord:
    """A run."""
    return RunRecord("0123456789abcdef", describe(store), assume_no_ttl=False, checksum=True, allow_loss=("ttl",))


def test_record_is_read_back(store: ObjectStore, record: RunRecord) -> None:
    """The record is read until it is removed; a cut one is damage, not absence."""
    assert manifest.read_run(store) is None
    write_record(store, layout.RUN, record)
    assert manifest.read_run(store) == record
    store.put("tikv-br/run.json", store.get("tikv-br/run.json")[:-50])
    with pytest.raises(BackupDamaged, match=r"run\.json"):
        manifest.read_run(store)
    for _twice in range(2):
        store.delete(layout.RUN)
    assert manifest.read_run(store) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster_id": 5}, ["cluster id was 7710567106009038031, is 5"]),
        ({"source_ranges": (KeyRange(b"a", b""),)}, ["source ranges was [start, end), is [61, end)"]),
        ({"engine": "store", "compression": "lz4"}, ["engine was scan, is store", "compression was zstd, is lz4"]),
        ({"keyspaces": ()}, ["keyspaces was 0, is none"]),
        ({"encryption": "aes128-ctr"}, ["encryption was plaintext, is aes128-ctr"]),
        ({"file_format": "parquet"}, ["file format was sst, is parquet"]),
        ({"tool_version": "9", "cluster_version": "9.9.9", "started_ms": 1, "backup_ts": 7, "engine_reason": "x"}, []),
    ],
)
def test_differences_that_matter_are_named(changes: dict[str, object], said: list[str], record: RunRecord) -> None:
    """Each in words; what decides on no row may differ."""
    other = structs.replace(record, run_id="f" * 16, description=structs.replace(record.description, **changes))
    assert differences(record, other) == said


def test_flags_that_decide_on_rows_are_compared(record: RunRecord) -> None:
    """They are in no manifest."""
    other = structs.replace(record, assume_no_ttl=True, checksum=False, allow_loss=())
    assert differences(record, other) == [
        "assume no ttl was False, is True",
        "checksum was True, is False",
        "allow loss was ttl, is none",
    ]
