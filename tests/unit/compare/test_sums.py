"""Sums of rows that expire, against counting them one by one."""

from __future__ import annotations

import fastcrc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.compare.sides import live_sums
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec

FIRST, LAST = 1000, 1006
ROWS = st.dictionaries(
    st.binary(max_size=3), st.tuples(st.binary(max_size=5), st.sampled_from([0, *range(998, 1009)])), max_size=12
)
CODECS = [KeyCodec(ApiVersion.V1TTL), KeyCodec(ApiVersion.V2, 4242)]


def counted(rows: dict[bytes, tuple[bytes, int]], codec: KeyCodec, now: int) -> Checksum:
    """What a store answers, row by row."""
    crc = kvs = size = 0
    for key, (value, expire) in rows.items():
        if expire == 0 or expire > now:
            pair = codec.rpc_key(key) + value
            crc ^= fastcrc.crc64.xz(pair)
            kvs += 1
            size += len(pair)
    return Checksum(crc, kvs, size)


@pytest.mark.parametrize("codec", CODECS)
@given(rows=ROWS)
def test_checksums_of_all_seconds_of_the_window(codec: KeyCodec, rows: dict[bytes, tuple[bytes, int]]) -> None:
    """Exactly the checksums that the rows alive at each second have, the last second first."""
    keys = sorted(rows)
    batch = columns.records(
        columns.from_list(keys),
        columns.from_list([rows[key][0] for key in keys]),
        expire_ts=np.array([rows[key][1] for key in keys], np.uint64),
    )
    expected = [counted(rows, codec, now) for now in range(LAST, FIRST - 1, -1)]
    assert live_sums(batch, codec.prefix, FIRST, LAST) == [
        sums for at, sums in enumerate(expected) if not at or sums.total_kvs != expected[at - 1].total_kvs
    ]
