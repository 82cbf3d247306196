"""A small backup to play with."""

from __future__ import annotations

import itertools

from tikv_br.backupset import layout
from tikv_br.backupset.files import Expiry, FileEntry, FileKind, FileWriter
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import Description
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore

PREFIX = b"r\0\0\0"
CUTS = (b"", b"g", b"p", b"")
"""Bounds of three intervals of a V1 source."""


def describe(store: ObjectStore) -> Description:
    """A backup of a whole V1 cluster as V2."""
    return Description(
        tool_version="0.1.0",
        engine="scan",
        file_format="sst",
        compression="zstd",
        cluster_id=7710567106009038031,
        cluster_version="9.0.0-beta.2",
        api_version=ApiVersion.V1,
        dst_api_version=ApiVersion.V2,
        source_ranges=(KeyRange(b"", b""),),
        ranges=(KeyRange(PREFIX, b"r\0\0\1"),),
        keyspaces=(0,),
        backup_ts=0,
        parent="",
        storage=store.location.redacted(),
        started_ms=1_795_256_305_000,
    )


def write_file(store: ObjectStore, name: str, data: bytes, span: KeyRange) -> FileEntry:
    """Store ``data`` as a file for ``span`` of the destination."""
    with FileWriter(store, name) as writer:
        writer.write(data)
        stored = writer.close()
    return FileEntry(
        **stored._asdict(),
        start_key=span.start,
        end_key=span.end,
        crc64xor=int.from_bytes(stored.sha256[:8], "big"),
        total_kvs=len(data),
        total_bytes=3 * len(data),
        expiry=Expiry(),
    )


def do_task(store: ObjectStore, number: int, attempt: str = "a1") -> LedgerEntry:
    """Output of the task of interval ``number``: the first has two files, the second none, the third one."""
    interval = KeyRange(CUTS[number], CUTS[number + 1])
    cuts = {0: (b"", b"c", b"g"), 1: (), 2: (b"p", None)}[number]
    files = tuple(
        write_file(
            store,
            layout.data_name(FileKind.SST, interval, attempt, place),
            f"file {number} {attempt} {place} ".encode() * 20_000,
            KeyRange(PREFIX + (start or b""), b"r\0\0\1" if end is None else PREFIX + end),
        )
        for place, (start, end) in enumerate(itertools.pairwise(cuts))
    )
    return LedgerEntry(interval.start, interval.end, attempt, files)


def do_all(store: ObjectStore) -> list[LedgerEntry]:
    """All three tasks."""
    return [do_task(store, number) for number in range(3)]
