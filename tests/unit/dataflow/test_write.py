"""Files of one task: cut by size, joined up in their ranges, gone when abandoned."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.dataflow.samples import options
from tikv_br.backupset.files import FileEntry, FileKind, totals
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.dataflow.convert import BatchStats, Converter
from tikv_br.dataflow.write import DataFiles
from tikv_br.errors import StorageFull
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsortedKeys
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import ScanPage, measure
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

CONVERTER = Converter(KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2), 1)
WHOLE = KeyRange(b"", b"")
Pages = list[list[tuple[bytes, bytes]]]


@st.composite
def paged_rows(draw: st.DrawFn) -> Pages:
    """Return sorted rows, dealt out into pages of any sizes."""
    table = draw(st.dictionaries(st.binary(max_size=12), st.binary(max_size=50), max_size=60))
    rest = sorted(table.items())
    pages: Pages = []
    while rest:
        size = draw(st.integers(1, len(rest)))
        pages.append(rest[:size])
        rest = rest[size:]
    return pages


def data_files(place: Path, file_bytes: int, kind: FileKind = FileKind.SST) -> DataFiles:
    """Return the writer of a task over everything."""
    store = open_store(StorageLocation("local", str(place)))
    return DataFiles(
        store,
        WHOLE,
        "try-1",
        CONVERTER,
        options(file_kind=kind, file_bytes=file_bytes),
    )


def write(files: DataFiles, pages: Pages) -> None:
    """Add pages as a task does."""
    for page in pages:
        scanned = ScanPage(columns.from_list([key for key, _ in page]), columns.from_list([value for _, value in page]))
        files.add(CONVERTER.convert_page(scanned))


def read(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the internal rows of an SST."""
    batches = SstReader(MemorySource(path.read_bytes())).batches()
    return [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()]


@given(paged_rows(), st.integers(1, 500))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_files_join_up_and_hold_all_rows(
    tmp_path_factory: pytest.TempPathFactory, pages: Pages, file_bytes: int
) -> None:
    """Ranges begin and end as the task's, meet in between, hold their own rows, and none is without rows."""
    place = tmp_path_factory.mktemp("files")
    files = data_files(place, file_bytes)
    write(files, pages)
    done = files.finish()
    assert bool(done) == bool(pages)
    if done:
        assert (done[0].start_key, done[-1].end_key) == (b"r\0\0\0", b"r\0\0\1")
        assert all(left.end_key == right.start_key for left, right in itertools.pairwise(done))
    rows = [row for file in done for row in read(place / file.name)]
    assert [CONVERTER.target.parse_storage_key(key[1:])[0][4:] for key, _ in rows] == [
        k for page in pages for k, _ in page
    ]
    for file in done:
        check_entry(file, place)
    assert all(file.total_bytes >= file_bytes for file in done[:-1])
    assert totals(done).total_kvs == len(rows)


@pytest.mark.parametrize("kind", FileKind)
def test_pages_as_they_came_make_the_same_files(tmp_path: Path, kind: FileKind) -> None:
    """A page is written without making records of it, or with them where the file needs that, to the same effect."""
    pages = [[(b"%03d" % (7 * page + row), b"v" * row) for row in range(7)] for page in range(5)]
    ours, theirs = (data_files(tmp_path / name, 40, kind) for name in ("ours", "theirs"))
    for page in pages:
        kvs = [kvrpcpb_pb2.KvPair(key=key, value=value) for key, value in page]
        raw = measure(kvrpcpb_pb2.RawScanResponse(kvs=kvs).SerializeToString())
        assert raw is not None
        scanned = raw.split()
        counted, converted = ours.add_page(raw), CONVERTER.convert_page(scanned)
        theirs.add(converted)
        assert all(getattr(counted, name) == getattr(converted, name) for name in BatchStats.__struct_fields__)
    written = ours.finish()
    assert len(written) > 1
    assert written == theirs.finish()


def check_entry(file: FileEntry, place: Path) -> None:
    """Hold what is recorded of a file against the file."""
    data = (place / file.name).read_bytes()
    assert file.size == len(data)
    assert file.sha256 == hashlib.sha256(data).digest()
    assert file.tail_sha256 == hashlib.sha256(data[-file.tail_size :]).digest()
    for key, _ in read(place / file.name):
        assert file.start_key <= CONVERTER.target.parse_storage_key(key[1:])[0] < file.end_key


@pytest.mark.parametrize("kind", FileKind)
def test_abandoned_files_are_gone(tmp_path: Path, kind: FileKind) -> None:
    """Finished ones and the open one, so that an attempt that fails leaves its place as it was."""
    files = data_files(tmp_path, 1, kind)
    write(files, [[(b"a", b"1")], [(b"b", b"2")], [(b"c", b"3")]])
    assert len(list(tmp_path.rglob(f"*{kind.suffix}"))) == 2
    files.abandon()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("kind", FileKind)
def test_rows_out_of_order_are_refused(tmp_path: Path, kind: FileKind) -> None:
    """A store that answers out of order must not become an SST that kills a store later."""
    files = data_files(tmp_path, 1 << 20, kind)
    with pytest.raises(UnsortedKeys):
        write(files, [[(b"b", b"1")], [(b"a", b"2")]])
    files.abandon()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("kind", FileKind)
def test_a_storage_that_fails_at_the_end_leaves_nothing(
    tmp_path: Path, kind: FileKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage's own error comes out, also from below Arrow, and the file that was being ended is gone."""

    def fail(*_arguments: object) -> None:
        raise StorageFull("no room")

    files = data_files(tmp_path, 1 << 20, kind)
    write(files, [[(b"a", b"1")], [(b"b", b"2")]])
    monkeypatch.setattr("tikv_br.storage.local._LocalWriter.write", fail)
    with pytest.raises(StorageFull):
        files.finish()
    files.abandon()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
