r"""The RocksDB of a playground, which all stores share. Its keys are as in TiKV.

Data keys are ``z`` + storage key, so that SSTs written for TiKV can be ingested unchanged, in TiKV's three column families. The
playground's own records (regions, ids, PD state) are below ``\x01`` of the default one, as TiKV's local keys are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, cast

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
)

from tikv_br.formats.keys.codec import DATA_PREFIX

DEFAULT: Final = "default"
LOCK: Final = "lock"
WRITE: Final = "write"
COLUMN_FAMILIES: Final = (DEFAULT, LOCK, WRITE)
Change = tuple[str, bytes, bytes | None]
"""A write: column family, data key, and the value, or None to delete the key."""
_DATA_END: Final = bytes([DATA_PREFIX[0] + 1])
_META: Final = b"\x01playground/"
_BLOCK_CACHE_BYTES: Final = 64 << 20
_MEMTABLE_BYTES: Final = 32 << 20


class RocksEngine:
    """A RocksDB with TiKV's key layout. Thread-safe; an acknowledged write survives a SIGKILL of the process."""

    def __init__(self, db: Rdict, path: Path) -> None:
        self._db = db
        self._families = {DEFAULT: db, LOCK: db.get_column_family(LOCK), WRITE: db.get_column_family(WRITE)}
        self._handles = {name: db.get_column_family_handle(name) for name in COLUMN_FAMILIES}
        self.path = path

    @classmethod
    def open(cls, path: Path) -> RocksEngine:
        """Open or create the database in the folder ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        options = _options()
        options.create_missing_column_families(create_missing_cfs=True)
        return cls(Rdict(str(path), options, column_families={LOCK: _options(), WRITE: _options()}), path)

    def close(self) -> None:
        self._handles.clear()  # each keeps the database open
        for family in self._families.values():
            family.close()

    def get(self, key: bytes, family: str = DEFAULT) -> bytes | None:
        """The value of a data key (with ``z``), None if there is none."""
        value: bytes | None = self._families[family].get(key)
        return value

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Apply all puts, then all deletes, as one atomic batch. A later put of the same key wins."""
        batch = WriteBatch(raw_mode=True)
        for key, value in puts:
            batch[key] = value
        for key in deletes:
            del batch[key]
        self._db.write(batch)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes of any column families, in order, as one atomic batch."""
        batch = WriteBatch(raw_mode=True)
        for family, key, value in changes:
            if value is None:
                batch.delete(key, self._handles[family])
            else:
                batch.put(key, value, self._handles[family])
        self._db.write(batch)

    def iterate(
        self, start: bytes, end: bytes, *, reverse: bool = False, family: str = DEFAULT
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows of [start, end) in key order (descending when ``reverse``) as of the first one.

        Bounds are data keys; ``end`` b"" is the end of all data.
        """
        start, end = max(start, DATA_PREFIX), end or _DATA_END
        if start >= end:
            return
        options = ReadOptions()  # a local of this generator: rocksdict's iterators point into it without keeping it
        options.set_iterate_upper_bound(end)
        items = self._families[family].items(backwards=reverse, from_key=end if reverse else start, read_opt=options)
        rows = cast("Iterator[tuple[bytes, bytes]]", items)
        # rocksdict 0.3 ignores a lower bound in reverse.
        yield from itertools.takewhile(lambda row: row[0] >= start, rows) if reverse else rows

    def iterate_data(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows of [start, end), raw and transactional ones, in key order: all that counts for sizes and splits."""
        return heapq.merge(self.iterate(start, end), self.iterate(start, end, family=WRITE))

    def delete_range(self, start: bytes, end: bytes, families: Iterable[str] = (DEFAULT,)) -> None:
        """Remove every row of [start, end) physically; ``end`` b"" is the end of all data."""
        for family in families:
            self._families[family].delete_range(max(start, DATA_PREFIX), end or _DATA_END)

    def ingest(self, paths: Iterable[Path | str], family: str = DEFAULT) -> None:
        """Ingest copies of SST files. Their rows replace older ones of the same keys.

        Raises RocksDB's error for a file it cannot read, which would crash a real store.
        """
        options = IngestExternalFileOptions()
        options.set_move_files(v=False)
        self._families[family].ingest_external_file([str(path) for path in paths], options)

    def get_meta(self, name: str) -> bytes | None:
        """One of the playground's own records, None if there is none."""
        value: bytes | None = self._db.get(_META + name.encode())
        return value

    def put_meta(self, records: dict[str, bytes | None]) -> None:
        """Write several of the playground's own records in one atomic batch; None removes one."""
        batch = WriteBatch(raw_mode=True)
        for name, value in records.items():
            if value is None:
                del batch[_META + name.encode()]
            else:
                batch[_META + name.encode()] = value
        self._db.write(batch)

    def list_meta(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """All records whose name starts with ``prefix``, in order, as (name, value)."""
        start = _META + prefix.encode()
        for key, value in cast("Iterator[tuple[bytes, bytes]]", self._db.items(from_key=start)):
            if not key.startswith(start):
                return
            yield key[len(_META) :].decode(), value


def _options() -> Options:
    """Bounded memory, so that a playground fits beside the tests that use it."""
    table = BlockBasedOptions()
    table.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    table.set_block_size(16 << 10)
    options = Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_write_buffer_number(3)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    return options
