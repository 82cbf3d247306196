"""A task that waits for pages continues with parallel scans: the same rows, in adjacent files, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from bench.dataset import Dataset
from bench.replay import replaying
from bench.scan_to_sst import scan_task
from tests.support.ledgers import read_entries
from tikv_br.backup.scan import ScanProbe
from tikv_br.backupset.layout import is_data
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import PathState, path_state
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage
from tikv_br.formats.rows import from_storage
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
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
def parallel_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each task continue with three parallel scans, however quick its pages come."""
    monkeypatch.setattr(ScanProbe, "parallel_scans", lambda _, copied: 3 if copied > TRIAL else 0)


def test_rows_and_files(server: str, tmp_path: Path) -> None:
    """All rows are there once, in the order of the files, whose ranges are adjacent; sums and counts are those of all scans."""
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
    assert pa.concat_arrays([batch["key"] for batch in found]).equals(records["key"])
    assert pa.concat_arrays([batch["value"] for batch in found]).equals(records["value"])


def test_an_error_in_one_scan_ends_all(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of any scan stays in the storage."""
    scan = RawClient.scan_raw_pages

    def failing(self: RawClient, span: KeyRange, **options: None) -> Iterator[RawPage]:
        pages = scan(self, span, **options)
        if span.start and span.end:  # the scan in the middle, or the first one's rest
            next(pages)
            raise RequestRefused("a page that cannot be")
        yield from pages

    monkeypatch.setattr(RawClient, "scan_raw_pages", failing)
    with pytest.raises(RequestRefused):
        scan_task(server, str(tmp_path), Compression.ZSTD)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_files_left_behind_are_recognized(server: str, tmp_path: Path) -> None:
    """Files of all scans are known as the remains of a discarded run, which `abort` removes."""
    scan_task(server, str(tmp_path), Compression.ZSTD)
    store = open_store(StorageLocation("local", str(tmp_path)))
    for info in list(store.list()):
        if not is_data(info.name):
            store.delete(info.name)
    assert path_state(store) is PathState.REMAINS


def entries(folder: Path) -> list[LedgerEntry]:
    """Ledger entries of attempts."""
    return read_entries(open_store(StorageLocation("local", str(folder))))


def stored(path: Path) -> Iterator[pa.RecordBatch]:
    """Return the rows of an SST."""
    return SstReader(MemorySource(path.read_bytes())).batches()
