"""A task whose pages are waited for goes on in several lanes: the same rows, in files that join up, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from bench.dataset import Dataset
from bench.replay import replaying
from bench.scan_to_sst import scan_task
from formats import columns
from formats.api_version import ApiVersion
from formats.checksum import checksum
from formats.keys import KeyCodec
from formats.rawscan import RawPage
from formats.rows import from_storage
from formats.sst import Compression, MemorySource, SstReader
from tikv_br.backup import scan_lane
from tikv_br.backupset.ledger import LedgerEntry, read_entries
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import RequestRefused
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

DATASET = Dataset(20_000, 30)
TRIAL = 1000 * (30 + 16)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the address of a server with several regions."""
    with replaying(DATASET, regions=7) as address:
        yield address


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each task go on in three lanes, however quick its pages come."""
    monkeypatch.setattr(scan_lane.Trial, "lanes", lambda _, copied: 3 if copied > TRIAL else 0)


def test_rows_and_files(server: str, tmp_path: Path) -> None:
    """All rows are there once, in the order of the files, whose ranges join up; sums and counts are those of all lanes."""
    scan_task(server, str(tmp_path), Compression.ZSTD)
    [entry] = entries(tmp_path)
    records = DATASET.records()
    assert entry.source == checksum(records["key"], records["value"])
    assert len(entry.files) == 3
    assert all(before.end_key == after.start_key for before, after in pairwise(entry.files))
    assert sum(file.total_kvs for file in entry.files) == DATASET.rows
    assert len(entry.regions) == 7
    assert all(before.end == after.start for before, after in pairwise(entry.regions))
    assert sum(region.total_kvs for region in entry.regions) == DATASET.rows
    found = [
        from_storage(rows, KeyCodec(ApiVersion.V2)) for file in entry.files for rows in stored(tmp_path / file.name)
    ]
    assert columns.concat([batch["key"] for batch in found]).equals(records["key"])
    assert columns.concat([batch["value"] for batch in found]).equals(records["value"])


def test_an_error_in_one_lane_ends_all(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of any lane stays in the storage."""
    scan = RawClient.scan_raw_pages

    def failing(self: RawClient, start: bytes, end: bytes, **options: None) -> Iterator[RawPage]:
        pages = scan(self, start, end, **options)
        if start and end:  # the lane in the middle, or the first one's rest
            next(pages)
            raise RequestRefused("a page that cannot be")
        yield from pages

    monkeypatch.setattr(RawClient, "scan_raw_pages", failing)
    with pytest.raises(RequestRefused):
        scan_task(server, str(tmp_path), Compression.ZSTD)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def entries(folder: Path) -> list[LedgerEntry]:
    """What attempts have recorded."""
    return read_entries(open_store(StorageLocation("local", str(folder))))


def stored(path: Path) -> Iterator[pa.RecordBatch]:
    """Return the rows of an SST."""
    return SstReader(MemorySource(path.read_bytes())).batches()
