"""Looks up the changes of one key in a log archive."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tikv_br.archive.log import READERS, LogArchive
from tikv_br.backupset.files import FileEntry
from tikv_br.formats.keys.ranges import KeyRange


class KeyChange(NamedTuple):
    """A version of a key."""

    ts: int
    deleted: bool
    value: bytes
    """Empty for a delete."""
    expire_ts: int
    """Seconds since the epoch; 0 = never."""


def changes_of(archive: LogArchive, user_key: bytes, after_ts: int, up_to_ts: int) -> list[KeyChange]:
    """The versions of a key with after_ts < ts <= up_to_ts that the log has, by ts. It may lack some: see `gaps` and `inexact_windows`.

    Raises `LogDamaged`, `StorageError`.
    """
    rpc_key = archive.codec.rpc_key(user_key)
    span = KeyRange(rpc_key, rpc_key + b"\0")
    files = {
        file.name: file
        for segment in archive.segments
        for file in segment.files
        if file.min_ts <= up_to_ts and file.max_ts > after_ts and file.key_range.contains(span)
    }

    def read(file: FileEntry) -> list[KeyChange]:
        return [change for change in _versions(archive, file, span) if after_ts < change.ts <= up_to_ts]

    with ThreadPoolExecutor(READERS, thread_name_prefix="lookup") as pool:
        return sorted({change for found in pool.map(read, files.values()) for change in found})


def _versions(archive: LogArchive, file: FileEntry, span: KeyRange) -> Iterator[KeyChange]:
    for batch in archive.rows(file, span):
        for row in batch.select(["ts", "deleted", "value", "expire_ts"]).to_pylist():
            yield KeyChange(row["ts"], row["deleted"], b"" if row["deleted"] else row["value"], row["expire_ts"])
