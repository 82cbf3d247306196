"""How the rows of a backup become the bytes of a file, for each kind of file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from formats.keys import KeyCodec
from formats.rawscan import RawPage
from formats.sst.compression import Compression
from tikv_br.backup.convert import Converter, Counted
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileKind
from tikv_br.proof.ranges import user_range

if TYPE_CHECKING:
    import pyarrow as pa

Sink = Callable[[bytes], object]
PARQUET_FORMAT_VERSION = "1"


class RowWriter(Protocol):
    """Turns records into one file's bytes. For one thread."""

    def append(self, records: pa.RecordBatch) -> None:
        """Add rows of ``SCHEMA`` that follow those before. Raises `UnsortedKeys`, and what the sink raises."""

    def append_page(self, page: RawPage, converter: Converter) -> Counted:
        """Add the rows of a scan's page, none of which expires, converted; what they are.

        Raises as `append` does, and `DamagedBytes` for keys outside of the source's keyspace.
        """

    def finish(self, span: KeyRange) -> None:
        """Write the rest of the file, which covers ``span`` (RPC keys)."""

    def abort(self) -> None:
        """Write nothing any more: the file is thrown away."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """What the files of a backup are like. Pickles."""

    kind: FileKind = FileKind.SST
    compression: Compression = Compression.ZSTD
    compression_level: int = 0
    """0 = the compression's default."""

    def open(self, sink: Sink, codec: KeyCodec) -> RowWriter:
        """A writer of one file in the encoding of ``codec``; ``sink`` gets the bytes in order."""
        match self.kind:
            case FileKind.SST:
                return _SstRows(sink, self, codec)
            case FileKind.PARQUET:
                return _ParquetRows(sink, self, codec)


class _SstRows:
    def __init__(self, sink: Sink, form: FileForm, codec: KeyCodec) -> None:
        from formats.sst import SstOptions, SstWriter

        self._codec = codec
        self._writer = SstWriter(sink, SstOptions(form.compression, form.compression_level))

    def append(self, records: pa.RecordBatch) -> None:
        from formats.rows import to_storage

        self._writer.append(to_storage(records, self._codec))

    def append_page(self, page: RawPage, converter: Converter) -> Counted:
        return converter.counted(self._writer.append_page(page, converter.page_form))

    def finish(self, span: KeyRange) -> None:  # noqa: ARG002 - an SST has no place for it
        self._writer.finish()

    def abort(self) -> None:
        pass


class _ParquetRows:
    def __init__(self, sink: Sink, form: FileForm, codec: KeyCodec) -> None:
        from formats.parquet_writer import ParquetOptions, ParquetWriter

        self._codec = codec
        self._writer = ParquetWriter(sink, ParquetOptions(form.compression, form.compression_level))

    def append(self, records: pa.RecordBatch) -> None:
        self._writer.append(records)

    def append_page(self, page: RawPage, converter: Converter) -> Counted:
        converted = converter.convert_page(page.split())
        self.append(converted.records)
        return converted

    def finish(self, span: KeyRange) -> None:
        start, end = user_range(self._codec, span)
        facts = {
            "format_version": PARQUET_FORMAT_VERSION,
            "api_version": self._codec.api_version.label,
            "start_key": start.hex(),
            "end_key": end.hex(),
        }
        if self._codec.is_v2:
            facts["keyspace_id"] = str(self._codec.keyspace_id)
        self._writer.finish(facts)

    def abort(self) -> None:
        self._writer.abort()
