"""Rows of the cluster one by one, for ranges in which some may be there or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from formats.checksum import Checksum, checksum
from formats.keys import KeyCodec
from formats.records import SCHEMA
from tikv_br.proof.live_sums import LiveSums

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.rawscan import ScanPage


def compare_rows(pages: Iterable[ScanPage], expected: LiveSums, codec: KeyCodec) -> tuple[Checksum, bool]:
    """The checksum of scanned rows, and whether they are those expected.

    All rows that outlive the window must be there; of those that expire inside it any may be missing, and what is there
    must be as expected. The range of the pages is that of ``expected``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    passing = pa.Table.from_batches(expected.passing, SCHEMA)  # none are left where all of them have expired by now
    passing_keys, passing_values = (passing[name].combine_chunks() for name in ("key", "value"))
    lasting = there = Checksum()
    equal = True
    for page in pages:
        at = pc.index_in(_user_keys(page.keys, codec), value_set=passing_keys)
        known = at.is_valid()
        values = page.values.filter(known)
        equal = equal and values.equals(passing_values.take(at.filter(known)))
        there += checksum(page.keys.filter(known), values)
        lasting += checksum(page.keys.filter(at.is_null()), page.values.filter(at.is_null()))
    return there + lasting, equal and lasting == expected.lasting


def _user_keys(keys: pa.LargeBinaryArray, codec: KeyCodec) -> pa.LargeBinaryArray:
    import pyarrow.compute as pc

    return pc.binary_replace_slice(keys, 0, len(codec.prefix), b"") if codec.prefix else keys
