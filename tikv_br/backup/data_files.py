"""The data files of one task: cut at a size, streamed into the storage, recorded with checksums and identity."""

from __future__ import annotations

import logging
import time

from formats.checksum import Checksum
from formats.keys import KeyCodec
from formats.rawscan import RawPage
from formats.sst.coding import Readable
from tikv_br.backup.convert import Converted, Converter, Counted, join_expiry
from tikv_br.backup.row_writer import FileForm
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import Expiry, FileEntry, FileWriter
from tikv_br.errors import StorageError
from tikv_br.storage.base import ObjectStore

log = logging.getLogger(__name__)


class DataFiles:
    """Writes the rows of one interval. File ranges join up to the interval's; without rows there is no file.

    Leave it by `finish` or `abandon`.
    """

    def __init__(
        self,
        store: ObjectStore,
        interval: KeyRange,
        target_range: KeyRange,
        attempt: str,
        *,
        form: FileForm,
        codec: KeyCodec,
        file_bytes: int,
    ) -> None:
        """``interval`` names the files; ``target_range`` is what they cover, in RPC keys of ``codec``, the target's."""
        self.seconds_uploading = 0.0
        """Of the time in `add` and `finish`, what went to handing bytes to the storage."""
        self._store = store
        self._interval = interval
        self._attempt = attempt
        self._form = form
        self._codec = codec
        self._file_bytes = file_bytes
        self._next_start = target_range.start
        self._end = target_range.end
        self._open: _OpenFile | None = None
        self._done: list[FileEntry] = []

    def add(self, rows: Converted) -> None:
        """Append rows that follow those before. Raises `StorageError`, `UnsortedKeys`."""
        self._file_from(rows.first_key).add(rows)

    def add_page(self, page: RawPage, converter: Converter) -> Counted:
        """Append the rows of a scan's page, none of which expires, converted; what they are.

        Raises as `add` does, and `DamagedBytes` for keys outside of the source's keyspace.
        """
        return self._file_from(converter.first_key(page)).add_page(page, converter)

    def _file_from(self, first_key: bytes) -> _OpenFile:
        """The file that rows from this key on go into."""
        if self._open is not None and self._open.sums.total_bytes >= self._file_bytes:
            self._close(first_key)
        if self._open is None:
            name = layout.data_name(self._form.kind, self._interval, self._attempt, len(self._done))
            self._open = _OpenFile(FileWriter(self._store, name), self._next_start, self._form, self._codec)
        return self._open

    def narrow(self, end: bytes) -> None:
        """Cover no more than up to this RPC key of the target: the rest is another's."""
        self._end = end

    def finish(self) -> tuple[FileEntry, ...]:
        """Close the last file; all are in the storage then."""
        if self._open is not None:
            self._close(self._end)
        return tuple(self._done)

    def abandon(self) -> None:
        """Remove what was written. What the storage refuses to remove stays, unreferenced, and is logged."""
        if self._open is not None:
            self._open.abort()
            self._open = None
        for file in self._done:
            try:
                self._store.delete(file.name)
            except StorageError as error:
                log.warning("%s of a failed task stays in the storage: %s", file.name, error.message)
        self._done.clear()

    def _close(self, end: bytes) -> None:
        if self._open is None:
            return
        self._done.append(self._open.close(end))
        self.seconds_uploading += self._open.seconds_uploading
        self._open = None
        self._next_start = end


class _OpenFile:
    """One file being written."""

    def __init__(self, file: FileWriter, start: bytes, form: FileForm, codec: KeyCodec) -> None:
        self.sums = Checksum()
        self.seconds_uploading = 0.0
        self._start = start
        self._expiry = Expiry()
        self._timestamps: list[int] = []
        self._file = file
        self._rows = form.open(self._upload, codec)

    def add(self, rows: Converted) -> None:
        self._rows.append(rows.records)
        self._note(rows)

    def add_page(self, page: RawPage, converter: Converter) -> Counted:
        counted = self._rows.append_page(page, converter)
        self._note(counted)
        return counted

    def _note(self, rows: Counted) -> None:
        self.sums += rows.target
        self._expiry = join_expiry(self._expiry, rows.expiry)
        self._timestamps += rows.timestamps

    def close(self, end: bytes) -> FileEntry:
        self._rows.finish(KeyRange(self._start, end))
        began = time.perf_counter()
        stored = self._file.close()
        self.seconds_uploading += time.perf_counter() - began
        return FileEntry(
            **stored._asdict(),
            start_key=self._start,
            end_key=end,
            crc64xor=self.sums.crc64xor,
            total_kvs=self.sums.total_kvs,
            total_bytes=self.sums.total_bytes,
            min_ts=min(self._timestamps),
            max_ts=max(self._timestamps),
            expiry=self._expiry,
        )

    def abort(self) -> None:
        with self._file:
            self._rows.abort()

    def _upload(self, data: Readable) -> None:
        began = time.perf_counter()
        self._file.write(data)
        self.seconds_uploading += time.perf_counter() - began
