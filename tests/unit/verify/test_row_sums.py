"""Rows of files without a structure of their own, against what such a file may hold."""

from __future__ import annotations

import numpy as np
import pytest

from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.verify.row_sums import sum_records

V1 = KeyCodec(ApiVersion.V1)
V1TTL = KeyCodec(ApiVersion.V1TTL)
V2 = KeyCodec(ApiVersion.V2, 7)
Row = tuple[bytes, int, int, bool]
"""Key, expiry, ts, deleted."""


def sums(codec: KeyCodec, *batches: list[Row], start: bytes = b"", end: bytes = b"") -> tuple[int, Expiry]:
    """Number of rows, and those that expire."""
    span = codec.rpc_range(KeyRange(start, end))
    file = FileEntry("a.parquet", 0, span.start, span.end, 0, 0, 0)
    made = []
    for rows in batches:
        keys, expiries, timestamps, deleted = zip(*rows, strict=True)
        made.append(
            columns.records(
                columns.from_list(keys),
                columns.from_list([b"v"] * len(keys)),
                expire_ts=np.array(expiries, np.uint64),
                ts=np.array(timestamps, np.uint64),
                deleted=np.array(deleted),
            )
        )
    found = sum_records(made, file, codec)
    return found.rows, found.expiry


def test_sound_rows_are_counted() -> None:
    """Over batches, with what expires apart."""
    rows, expiry = sums(V1TTL, [(b"a", 5, 0, False)], [(b"b", 0, 0, False), (b"c", 9, 0, False)])
    assert rows == 3
    assert (expiry.total_kvs, expiry.earliest, expiry.latest) == (2, 5, 9)


@pytest.mark.parametrize(
    ("codec", "batches"),
    [
        (V1, [[(b"b", 0, 0, False), (b"a", 0, 0, False)]]),
        (V1, [[(b"b", 0, 0, False)], [(b"a", 0, 0, False)]]),
        (V1, [[(b"a", 0, 0, False), (b"a", 0, 0, False)]]),
        (V2, [[(b"a", 0, 5, False), (b"a", 0, 6, False)]]),
        (V1, [[(b"a", 5, 0, False)]]),
        (V1TTL, [[(b"a", 0, 0, True)]]),
        (V1, [[(b"z", 0, 0, False)]]),
    ],
    ids=["order", "order over batches", "twice", "older first", "expiry in v1", "tombstone in v1ttl", "out of range"],
)
def test_rows_that_the_file_cannot_have_are_refused(codec: KeyCodec, batches: list[list[Row]]) -> None:
    """Order, versions, the fields of the API version, and the file's own range."""
    with pytest.raises(FormatError):
        sums(codec, *batches, end=b"m")
