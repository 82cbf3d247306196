"""A look into an SST through RocksDB, by opening it as the only file of a scratch database.

Nothing of ``formats.sst`` is used here: what the product writes is judged by someone else's reader.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rocksdict import IngestExternalFileOptions, Options, Rdict

from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX, TS_SIZE
from formats.mce import ENCODED_GROUP, FULL
from formats.values import EXPIRE_SIZE, FLAG_DELETED, FLAG_EXPIRE

Row = tuple[bytes, bytes]

_INGEST_DIES: Final = (
    "External file global sequence number not found",
    "External file version not found",
    "File contain no entries",
)
"""What RocksDB says of properties that TiKV does not look at before the ingest, and dies of then."""


class UnreadableSst(Exception):
    """RocksDB cannot read the file; the message is its status."""


@dataclass(frozen=True, slots=True)
class SstFacts:
    """What a store finds in an SST: its outermost data keys (b"" when it cannot be opened for ingest), its rows.

    ``deadly`` says why a store that ingests it would die of it, sooner or later; empty when it would not.
    """

    first: bytes
    last: bytes
    entries: int
    deadly: str = ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Rdict]:
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


def inspect(path: Path, api_version: ApiVersion) -> SstFacts:
    """Read the whole file as a store of that API version would. Raises `UnreadableSst`."""
    try:
        with opened(path) as db:
            promised = sum(file["num_entries"] - file["num_deletions"] for file in db.live_files())
            return _judge(rows_of(db), promised, _ROW_CHECKS[api_version])
    except UnreadableSst as error:
        if any(text in str(error) for text in _INGEST_DIES):
            return SstFacts(b"", b"", 0, str(error))
        raise


def _judge(rows: Iterable[Row], promised: int, fault_of: Callable[[bytes, bytes], str]) -> SstFacts:
    first = last = b""
    entries = 0
    deadly = ""
    for key, value in rows:
        if not entries:
            first = key
        elif key <= last and not deadly:
            deadly = f"unsorted keys: {key.hex()} after {last.hex()}"
        if not deadly and (fault := fault_of(key, value)):
            deadly = f"{fault}: row {key.hex()}"
        last = key
        entries += 1
    if entries != promised and not deadly:
        deadly = f"unsorted keys: {entries} of {promised} rows can be read in order"
    return SstFacts(first, last, entries, deadly)


def _fault_v1(key: bytes, value: bytes) -> str:
    del value
    return "" if key.startswith(DATA_PREFIX) else "key without z"


def _fault_v1ttl(key: bytes, value: bytes) -> str:
    return _fault_v1(key, value) or ("" if len(value) >= EXPIRE_SIZE else "value without expiry")


def _fault_v2(key: bytes, value: bytes) -> str:
    groups, rest = divmod(len(key) - len(DATA_PREFIX) - TS_SIZE, ENCODED_GROUP)
    if not key.startswith(DATA_PREFIX):
        return "key without z"
    if groups < 1 or rest or key[-TS_SIZE - 1] == FULL:
        return "key that is not memcomparable bytes and a timestamp"
    flags = value[-1] if value else FULL
    if flags > FLAG_EXPIRE | FLAG_DELETED:
        return "value without flag byte"
    return "value without expiry" if flags & FLAG_EXPIRE and len(value) <= EXPIRE_SIZE else ""


_ROW_CHECKS: Final = {ApiVersion.V1: _fault_v1, ApiVersion.V1TTL: _fault_v1ttl, ApiVersion.V2: _fault_v2}


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
