"""SSTs that wait for their ingest: a store's folder of them, and their content as RocksDB reads it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from msgspec.structs import replace
from rocksdict import IngestExternalFileOptions, Options, Rdict

from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, ENCODED_GROUP, FULL, RAW_MODE, TS_SIZE
from tikv_br.formats.sst.block import FOOTER_SIZE, encode_entries
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import BLOCK_NAME, Table
from tikv_br.formats.values import EXPIRE_SIZE, FLAG_DELETED, FLAG_EXPIRE
from tikv_br.playground.encoding import Row
from tikv_br.playground.engine import DEFAULT, WRITE

_INGEST_CRASHES: Final = (
    "External file global sequence number not found",
    "External file version not found",
    "File contain no entries",
)
"""RocksDB's errors about properties that TiKV does not check before the ingest, which crashes it."""


class UnreadableSst(Exception):
    """RocksDB cannot read the file; the message is its status."""


@dataclass(frozen=True, slots=True)
class SstInspection:
    """The outermost data keys of an SST (b"" if it cannot be opened for ingest) and the number of its rows.

    ``deadly`` is why a store that ingests it would crash sooner or later; empty if it would not.
    """

    first: bytes
    last: bytes
    entries: int
    deadly: str = ""


@contextlib.contextmanager
def open_sst(path: Path) -> Iterator[Rdict]:
    """The SST as a read-only database of its own. Raises `UnreadableSst`; the file stays as it is."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=".scratch-"))
    try:
        link = folder / "file.sst"
        os.link(path, link)
        with rocksdb_errors(link, path):
            db = Rdict(str(folder / "db"), _scratch_options())
            try:
                moving = IngestExternalFileOptions()
                moving.set_move_files(v=True)
                db.ingest_external_file([str(link)], moving)
                yield db
            finally:
                db.close()
    finally:
        shutil.rmtree(folder)


def rows_of(db: Rdict) -> Iterator[Row]:
    """All rows in the order of the file; each block's checksum is verified on the way."""
    return cast("Iterator[Row]", db.items())


def with_properties(data: bytes, added: Mapping[str, bytes]) -> bytes:
    """An SST with further table properties: the new blocks come after the old ones, which nothing refers to any more."""
    table = Table(MemorySource(data))
    footer = table.footer
    body = bytearray(data[:-FOOTER_SIZE])

    def append(pairs: Mapping[str, bytes]) -> BlockHandle:
        block = encode_entries((name.encode(), value) for name, value in sorted(pairs.items()))
        handle = BlockHandle(len(body), len(block))
        body.extend(block + b"\0" + footer.checksum.compute([block], 0).to_bytes(4, "little"))
        return handle

    properties = append({**table.properties, **added})
    handles = {**table.metaindex, BLOCK_NAME: properties}
    metaindex = append({name: handle.encode() for name, handle in handles.items()})
    return bytes(body) + replace(footer, metaindex=metaindex).encode()


def inspect(path: Path, api_version: ApiVersion) -> SstInspection:
    """Read the whole file as a store of that API version would. Raises `UnreadableSst`."""
    try:
        with open_sst(path) as db:
            promised = sum(file["num_entries"] - file["num_deletions"] for file in db.live_files())
            return _facts(rows_of(db), promised, api_version)
    except UnreadableSst as error:
        if any(text in str(error) for text in _INGEST_CRASHES):
            return SstInspection(b"", b"", 0, str(error))
        raise


def _facts(rows: Iterable[Row], promised: int, api_version: ApiVersion) -> SstInspection:
    first = last = b""
    entries = 0
    deadly = ""
    for key, value in rows:
        if not entries:
            first = key
        elif key <= last and not deadly:
            deadly = f"unsorted keys: {key.hex()} after {last.hex()}"
        if not deadly and (fault := _row_fault(api_version, key, value)):
            deadly = f"{fault}: row {key.hex()}"
        last = key
        entries += 1
    if entries != promised and not deadly:
        deadly = f"unsorted keys: {entries} of {promised} rows can be read in order"
    return SstInspection(first, last, entries, deadly)


def _row_fault(api_version: ApiVersion, key: bytes, value: bytes) -> str:
    if not key.startswith(DATA_PREFIX):
        return "key without z"
    if api_version is ApiVersion.V1TTL:
        return "" if len(value) >= EXPIRE_SIZE else "value without expiry"
    if api_version is ApiVersion.V1:
        return ""
    groups, rest = divmod(len(key) - len(DATA_PREFIX) - TS_SIZE, ENCODED_GROUP)
    if groups < 1 or rest or key[-TS_SIZE - 1] == FULL:
        return "key that is not memcomparable bytes and a timestamp"
    if key[1] not in RAW_MODE:
        return ""  # the value, or commit record, of a transaction
    flags = value[-1] if value else FULL
    if flags > FLAG_EXPIRE | FLAG_DELETED:
        return "value without flag byte"
    return "value without expiry" if flags & FLAG_EXPIRE and len(value) <= EXPIRE_SIZE else ""


@contextlib.contextmanager
def rocksdb_errors(link: Path, path: Path) -> Iterator[None]:
    """Raise RocksDB's errors as `UnreadableSst`, with ``path`` where the status names ``link``.

    What rocksdict raises is a bare `Exception` with RocksDB's status as text; anything else passes.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise UnreadableSst(str(error).replace(str(link), str(path))) from error


def _scratch_options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    options.set_write_buffer_size(64 << 10)
    options.set_keep_log_file_num(1)
    options.set_disable_auto_compactions(disable=True)
    return options


COLUMN_FAMILIES: Final = (DEFAULT, WRITE)
"""Column families that an SST can be ingested into."""
_UUID_SIZE: Final = 16
_REMEMBERED: Final = 4096

_facts_by_digest: OrderedDict[tuple[str, ApiVersion], SstInspection] = OrderedDict()
"""The same bytes are read once, though each replica's store downloads them."""
_facts_lock = threading.Lock()


class BadMeta(Exception):
    """An ``SSTMeta`` whose file has no name; the message is the store's."""


class SstStore:
    """Files by ``SSTMeta``: uuid, region, epoch and column family make the name. Thread-safe for distinct files."""

    def __init__(self, folder: Path, api_version: ApiVersion) -> None:
        self.folder = folder
        self._api_version = api_version
        self._temp = folder / ".temp"
        self._temp.mkdir(parents=True, exist_ok=True)

    def path(self, meta: import_sstpb_pb2.SSTMeta) -> Path:
        """Return the path of a complete file until its ingest. Raises `BadMeta`."""
        return self.folder / _name(meta)

    def temp_path(self, meta: import_sstpb_pb2.SSTMeta) -> Path:
        """Return the path of an incomplete file. Raises `BadMeta`."""
        return self._temp / _name(meta)

    def facts(self, path: Path) -> SstInspection:
        """Return the facts of `inspect`, cached by content. Raises `UnreadableSst`."""
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest(), self._api_version
        with _facts_lock:
            if known := _facts_by_digest.get(key):
                return known
        facts = inspect(path, self._api_version)
        with _facts_lock:
            _facts_by_digest[key] = facts
            if len(_facts_by_digest) > _REMEMBERED:
                _facts_by_digest.popitem(last=False)
        return facts


def _name(meta: import_sstpb_pb2.SSTMeta) -> str:
    if len(meta.uuid) != _UUID_SIZE:
        raise BadMeta(f"invalid bytes length: expected {_UUID_SIZE}, found {len(meta.uuid)}")
    epoch = meta.region_epoch
    cf = meta.cf_name or "default"
    return f"{uuid.UUID(bytes=meta.uuid)}_{meta.region_id}_{epoch.conf_ver}_{epoch.version}_{cf}_2.sst"
