"""What is recorded of a file that a store wrote: identity, timestamps and expiry, by as few reads as the truth allows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from formats.api_version import ApiVersion
from formats.checksum import Checksum, checksum
from formats.errors import FormatError
from tikv_br.backup.convert import CONVERTED_TS, Converter, expiry_of, join_expiry
from tikv_br.backup.range_tree import StoredSst
from tikv_br.backup.store_errors import WRITES_ITSELF
from tikv_br.backupset.files import TAIL_SIZE, Expiry, FileEntry
from tikv_br.errors import BackupDamaged, StorageObjectMissing, StorageUnreachable
from tikv_br.storage.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from formats.sst import SstReader

TAIL_READS = 4
"""How often the end of a file is read at most, until two reads agree."""
_MIN_TS, _MAX_TS = "tikv.min_ts", "tikv.max_ts"
_MAX_EXPIRY = "tikv.max_expire_ts"
_COLLECTED = {ApiVersion.V1TTL: "tikv.range_index", ApiVersion.V2: "tikv.num_rows"}
"""What a store of each version notes in every file that it also notes the latest expiry in, if there is one."""


class Contents(NamedTuple):
    """What the rows of a file come to, beyond what its store said."""

    min_ts: int
    max_ts: int
    expiry: Expiry
    source: Checksum
    """As the source's servers count the rows; empty where nobody asked."""


@dataclass(frozen=True, slots=True)
class FileRecorder:
    """Records files. Pickles."""

    converter: Converter
    with_ttl: bool
    """Whether rows may expire, so that the expiry of each must be known."""
    with_source_sums: bool
    """Whether the source's checksum is asked for: where its form differs from the files', they are read for it."""

    def record(self, store: ObjectStore, written: StoredSst) -> tuple[FileEntry, Checksum]:
        """The entry of a file, and its `Contents.source`.

        Raises `StorageObjectMissing` where the stores wrote to another place than this process sees, `BackupDamaged` for
        a file that is not as its store said.
        """
        file = written.file
        info = _stat(store, written)
        tail = read_tail(store, written.name, info.size, file.sha256)
        try:
            contents = self._contents(store, written)
        except FormatError as error:
            raise BackupDamaged(f"{written.name} is not sound: {error}") from None
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
        )
        return entry, contents.source

    def _contents(self, store: ObjectStore, written: StoredSst) -> Contents:
        source, target = self.converter.source, self.converter.target
        said = _said(written)
        same_form = source.prefix == target.prefix
        ts = CONVERTED_TS if target.is_v2 and not source.is_v2 else 0
        if not self.with_ttl and not source.is_v2 and (same_form or not self.with_source_sums):
            return Contents(ts, ts, Expiry(), said if same_form else Checksum())
        from formats.sst import SstReader
        from tikv_br.proof.stored_file import StoredFile

        reader = SstReader(StoredFile(store, written.name, written.file.cipher_iv))
        noted = _noted(reader, source.api_version) if source.api_version is target.api_version else None
        return noted._replace(source=said) if noted is not None else self._count(reader, written)

    def _count(self, reader: SstReader, written: StoredSst) -> Contents:
        """Read the whole file, and hold it against what its store said."""
        from formats import columns
        from formats.rows import from_storage

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
        if counted != _said(written):
            raise BackupDamaged(f"{written.name} holds {counted}, its store counted {_said(written)}")
        return Contents(timestamps[0], timestamps[1], expiry, in_source_form)


def read_tail(store: ObjectStore, name: str, size: int, sha256: bytes) -> bytes:
    """The last bytes of a file of ``size`` bytes, as they lie in the storage.

    Their hash is recorded, and bytes altered on their way here would make a sound file look damaged for ever: so it is the whole
    file with the hash that its store gave (``sha256``), or what two reads agree on. Raises `StorageUnreachable` where none do.
    """
    before = b""
    for _ in range(TAIL_READS):
        tail = store.get_range(name, max(size - TAIL_SIZE, 0), TAIL_SIZE)
        if hashlib.sha256(tail).digest() == sha256 or (tail == before and len(tail) == min(size, TAIL_SIZE)):
            return tail
        before = tail
    raise StorageUnreachable(f"the end of {name} reads otherwise each time", hint="Check the network and the storage.")


def _stat(store: ObjectStore, written: StoredSst) -> ObjectInfo:
    try:
        info = store.stat(written.name)
    except StorageObjectMissing as error:
        raise StorageObjectMissing(
            f"a store wrote {written.name}, but it cannot be seen from here: {error.message}", hint=WRITES_ITSELF
        ) from None
    if info.size != written.file.size:
        raise BackupDamaged(f"{written.name} has {info.size} bytes, its store wrote {written.file.size}")
    return info


def _said(written: StoredSst) -> Checksum:
    """What the store counted, in the target's form."""
    return Checksum(written.file.crc64xor, written.file.total_kvs, written.file.total_bytes)


def _noted(reader: SstReader, api_version: ApiVersion) -> Contents | None:
    """What the store noted in the file itself, where that is enough: no row expires; None where rows must be read.

    Files of a conversion carry nonsense there: the store notes them as if they were of its own version.
    """
    notes = reader.properties
    if _COLLECTED[api_version] not in notes or _MAX_EXPIRY in notes:
        return None
    oldest, newest = (int.from_bytes(notes.get(name, b""), "big") for name in (_MIN_TS, _MAX_TS))
    return Contents(oldest, newest, Expiry(), Checksum())
