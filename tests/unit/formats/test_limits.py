"""Limits of rows, against the size of a raft entry as the playground counts it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tikv_br.formats import columns
from tikv_br.formats.keys.codec import encode
from tikv_br.formats.limits import RowLimits
from tikv_br.playground.region import Peer, Region
from tikv_br.playground.tikv_service import entry_size

LIMITS = RowLimits(key=8188)
ENTRY = 8 << 20
HUGE = (1 << 60) + 1


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("key_size", [1, 7, 4000, 8188])
def test_rows_below_the_limit_fit(key_size: int, *, is_v2: bool) -> None:
    """The largest row below it fits into an entry of any region; one that is 2 KiB larger does not."""
    region = Region(HUGE, b"", b"", HUGE, HUGE, (Peer(HUGE, HUGE),), HUGE)
    key = b"k" * key_size
    largest = LIMITS.row - key_size - key_size // 8
    stored = b"z" + (encode(b"r123" + key) + bytes(8) if is_v2 else key)
    for more, fits in ((0, True), (2048, False)):
        value = bytes(largest + more)
        rows = columns.from_list([key]), columns.from_list([value])
        assert LIMITS.large_rows(*rows).to_pylist() == [not fits]
        assert (entry_size(region, [(stored, value + bytes(9 * is_v2))], flagged=is_v2) <= ENTRY) is fits


def test_keys() -> None:
    """A key may have as many bytes as the limit; nulls stay null."""
    keys = pa.array([b"", b"k" * 8188, b"k" * 8189, None], pa.large_binary())
    assert LIMITS.long_keys(keys).to_pylist() == [False, False, True, None]
