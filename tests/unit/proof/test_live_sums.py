"""Sums of rows that expire, against counting them one by one."""

from __future__ import annotations

import fastcrc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.compare import LiveSums, count_live
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

FIRST, LAST = 1000, 1006
ROWS = st.dictionaries(
    st.binary(max_size=3), st.tuples(st.binary(max_size=5), st.sampled_from([0, *range(998, 1009)])), max_size=12
)
CODECS = [KeyCodec(ApiVersion.V1TTL), KeyCodec(ApiVersion.V2, 4242)]


def counted(rows: dict[bytes, tuple[bytes, int]], codec: KeyCodec, now: int, start: bytes, end: bytes) -> Checksum:
    """What a store answers, said the long way."""
    crc = kvs = size = 0
    for key, (value, expire) in rows.items():
        if key >= start and (not end or key < end) and (expire == 0 or expire > now):
            pair = codec.rpc_key(key) + value
            crc ^= fastcrc.crc64.xz(pair)
            kvs += 1
            size += len(pair)
    return Checksum(crc, kvs, size)


@pytest.mark.parametrize("codec", CODECS)
@given(rows=ROWS, start=st.binary(max_size=2), end=st.binary(max_size=2), cut=st.integers(0, 12))
def test_every_second_of_the_window_is_counted_right(
    codec: KeyCodec, rows: dict[bytes, tuple[bytes, int]], start: bytes, end: bytes, cut: int
) -> None:
    """At each second exactly the rows of the range that are alive then; batches make no difference."""
    keys = sorted(rows)
    batches = [
        columns.records(
            columns.from_list(part),
            columns.from_list([rows[key][0] for key in part]),
            expire_ts=np.array([rows[key][1] for key in part], np.uint64),
        )
        for part in (keys[:cut], keys[cut:])
        if part
    ]
    span = KeyRange(*codec.rpc_range(start, end))
    if span.is_empty:
        return
    sums = LiveSums(span, FIRST, LAST)
    count_live(batches, codec, [sums])
    expected = [counted(rows, codec, now, start, end) for now in range(FIRST, LAST + 1)]
    assert list(sums.each()) == expected
    assert [sums.at(now) for now in range(FIRST, LAST + 1)] == expected
