"""Files that stores wrote: computes what is recorded of them, and rewrites them into another encoding or format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backup.store_responses import STORES_WRITE_HINT, StoredSst
from tikv_br.backupset import backupmeta
from tikv_br.backupset.files import TAIL_SIZE, Expiry, FileEntry
from tikv_br.dataflow.convert import CONVERTED_TS, Converter, expiry_of, join_expiry
from tikv_br.dataflow.write import DataFiles
from tikv_br.errors import BackupDamaged, StorageObjectMissing, StorageUnreachable
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.sst.source import RandomAccess
from tikv_br.formats.sst.table import Table
from tikv_br.storage.base import ObjectInfo, ObjectSource, ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


TAIL_READS = 4
"""Maximum number of reads of a file's tail, until two agree."""
_MIN_TS, _MAX_TS = "tikv.min_ts", "tikv.max_ts"
_MAX_EXPIRY = "tikv.max_expire_ts"
_EXPIRY_COLLECTOR = {ApiVersion.V1TTL: "tikv.range_index", ApiVersion.V2: "tikv.num_rows"}
"""Property that a store of each version writes into every file if it also records the latest expiry there."""


class Contents(NamedTuple):
    """Facts about a file that must be recorded but are not in the store's response."""

    min_ts: int
    max_ts: int
    expiry: Expiry
    source: Checksum
    """Checksum as the source cluster computes it; empty if not needed."""


@dataclass(frozen=True, slots=True)
class FileRecorder:
    """Computes the manifest entries of stores' files. Picklable."""

    converter: Converter
    with_ttl: bool
    """True if rows can have an expiry, which must then be recorded."""
    with_source_sums: bool
    """True if the source's checksum is needed; files in another encoding are read for it."""
    expiry_in_properties: bool
    """True if properties have the expiry of rows; else V2 files are read for it."""

    def record(self, store: ObjectStore, written: StoredSst) -> tuple[FileEntry, Checksum]:
        """The entry of a file, and its `Contents.source`.

        Raises `StorageObjectMissing` if the stores wrote to another place than this process reads, `BackupDamaged` if the file is
        not what its store reported.
        """
        file = written.file
        info = _stat(store, written)
        tail = read_tail(store, written.name, info.size, file.sha256)
        try:
            contents = self._contents(store, written)
        except FormatError as error:
            raise BackupDamaged(f"{written.name} is damaged: {error}") from None
        entry = FileEntry(
            name=written.name,
            size=info.size,
            start_key=file.start_key,
            end_key=file.end_key,
            crc64xor=file.crc64xor,
            total_kvs=file.total_kvs,
            total_bytes=file.total_bytes,
            sha256=file.sha256,
            tail_sha256=hashlib.sha256(tail).digest(),
            tail_size=len(tail),
            etag=info.etag,
            min_ts=contents.min_ts,
            max_ts=contents.max_ts,
            expiry=contents.expiry,
            cipher_iv=file.cipher_iv,
            cf="write" if file.cf == "write" else "default",
        )
        return entry, contents.source

    def _contents(self, store: ObjectStore, written: StoredSst) -> Contents:
        source, target = self.converter.source, self.converter.target
        reported = _store_sums(written)
        if source.mode is KeyMode.TXN:
            return Contents(0, 0, Expiry(), reported)
        same_form = source.prefix == target.prefix
        ts = CONVERTED_TS if target.is_v2 and not source.is_v2 else 0
        if not self.with_ttl and not source.is_v2 and (same_form or not self.with_source_sums):
            return Contents(ts, ts, Expiry(), reported if same_form else Checksum())
        stored = ObjectSource(store, written.name, written.file.cipher_iv)
        recorded = (
            _contents_by_properties(Table(stored), source.api_version)
            if source.api_version is target.api_version and (self.expiry_in_properties or not source.is_v2)
            else None
        )
        return recorded._replace(source=reported) if recorded is not None else self._count(stored, written)

    def _count(self, stored: RandomAccess, written: StoredSst) -> Contents:
        """Read the whole file, and check it against what its store reported."""
        from tikv_br.formats import columns  # imports Arrow and Numba, which most files do not need
        from tikv_br.formats.rows import from_storage
        from tikv_br.formats.sst.reader import SstReader

        reader = SstReader(stored)
        source, target = self.converter.source, self.converter.target
        counted, in_source_form, expiry, timestamps = Checksum(), Checksum(), Expiry(), [0, 0]
        for rows in reader.batches():
            records = from_storage(rows, target)
            keys, values, ts = records["key"], records["value"], columns.numbers(records["ts"])
            counted += checksum(keys, values, target.prefix)
            if self.with_source_sums:
                in_source_form += checksum(keys, values, source.prefix)
            expiry = join_expiry(expiry, expiry_of(keys, values, columns.numbers(records["expire_ts"]), target.prefix))
            timestamps = [min(timestamps[0] or int(ts.min()), int(ts.min())), max(timestamps[1], int(ts.max()))]
        if counted != _store_sums(written):
            raise BackupDamaged(f"{written.name} has {counted}, its store reported {_store_sums(written)}")
        return Contents(timestamps[0], timestamps[1], expiry, in_source_form)


def read_tail(store: ObjectStore, name: str, size: int, sha256: bytes) -> bytes:
    """The last bytes of a file of ``size`` bytes, as stored.

    Their hash is recorded, and a transfer error would make an intact file look damaged for good. So a read counts only if it is the
    whole file with the hash that its store reported (``sha256``), or if two reads agree. Raises `StorageUnreachable` if none do.
    """
    before = b""
    for _ in range(TAIL_READS):
        tail = store.get_range(name, max(size - TAIL_SIZE, 0), TAIL_SIZE)
        if hashlib.sha256(tail).digest() == sha256 or (tail == before and len(tail) == min(size, TAIL_SIZE)):
            return tail
        before = tail
    raise StorageUnreachable(f"the tail of {name} is different on each read", hint="Check the network and the storage.")


def _stat(store: ObjectStore, written: StoredSst) -> ObjectInfo:
    try:
        info = store.stat(written.name)
    except StorageObjectMissing as error:
        raise StorageObjectMissing(
            f"a store wrote {written.name}, but this machine cannot find it: {error.message}", hint=STORES_WRITE_HINT
        ) from None
    if info.size != written.file.size:
        raise BackupDamaged(f"{written.name} has {info.size} bytes, but its store wrote {written.file.size}")
    return info


def _store_sums(written: StoredSst) -> Checksum:
    """The store's sums of a file, in the encoding that it wrote."""
    return Checksum(written.file.crc64xor, written.file.total_kvs, written.file.total_bytes)


def _contents_by_properties(table: Table, api_version: ApiVersion) -> Contents | None:
    """The contents by the properties of the file; None if they do not suffice, because rows may expire.

    Not for converted files: the store writes their properties as if they had its own API version.
    """
    properties = table.properties
    if _EXPIRY_COLLECTOR[api_version] not in properties or _MAX_EXPIRY in properties:
        return None
    if api_version is not ApiVersion.V2:  # some versions of TiKV take the end of a key for a timestamp
        return Contents(0, 0, Expiry(), Checksum())
    oldest, newest = (int.from_bytes(properties.get(name, b""), "big") for name in (_MIN_TS, _MAX_TS))
    return Contents(oldest, newest, Expiry(), Checksum())


@dataclass(slots=True)
class RewriteTotals:
    """Totals of the rows written into new files."""

    source: Checksum = field(default_factory=Checksum)
    """Checksum as the source's servers compute it."""
    dropped_ttls: int = 0
    dropped_tombstones: int = 0


def rewrite_files(
    store: ObjectStore, written: Iterable[StoredSst], converter: Converter, files: DataFiles
) -> Iterator[RewriteTotals]:
    """Convert stores' files, in key order; yields the totals so far before the first and after each batch.

    Raises `BackupDamaged` for a file that is not what its store reported, and the errors of reading and writing.
    """
    total = RewriteTotals()
    yield total
    for file in written:
        before = total.source
        for records in _live_records(store, file, converter.source, total):
            converted = converter.convert(records)
            files.add(converted)
            total.source += converted.source
            total.dropped_ttls += converted.dropped_ttls
            yield total
        if before + _store_sums(file) != total.source:
            raise BackupDamaged(f"{file.name} differs from what its store reported, {_store_sums(file)}")


def _live_records(
    store: ObjectStore, file: StoredSst, codec: KeyCodec, total: RewriteTotals
) -> Iterator[pa.RecordBatch]:
    from tikv_br.backupset.rows import file_errors, read_rows
    from tikv_br.formats import columns
    from tikv_br.formats.rows import LiveFilter

    undeleted = LiveFilter()
    entry = replace(backupmeta.decode_file(file.file), name=file.name)
    for batch in read_rows(store, entry, codec):
        total.dropped_tombstones += int(columns.flags(batch["deleted"]).sum())
        with file_errors(entry):
            alive = undeleted.apply(batch)
        if alive.num_rows:
            yield alive
