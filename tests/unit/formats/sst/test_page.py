"""Pages of RawScan made into tables as they came: the same bytes and sums as by way of records, whatever the page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksums
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.rawscan import RawPage, measure
from tikv_br.formats.rows import to_storage
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.encode import encode_page, largest_key, page_encoding
from tikv_br.formats.sst.writer import SstOptions, SstWriter

V1, V2 = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2)
Rows = Sequence[tuple[bytes, bytes]]
TIGHT = SstOptions(Compression.NONE, block_size=1024, restart_interval=3)

codecs = st.sampled_from([V1, KeyCodec(ApiVersion.V1TTL), V2, KeyCodec(ApiVersion.V2, 0x01_0203)])
keys = st.binary(max_size=40) | st.text("\0\x01\xff", max_size=20).map(lambda text: text.encode("latin-1"))
values = st.binary(max_size=40) | st.binary(min_size=1, max_size=3).map(lambda data: data * 700)
tables = st.dictionaries(keys, values, min_size=1, max_size=60).map(lambda rows: sorted(rows.items()))


def serialized(rows: Rows, codec: KeyCodec) -> bytes:
    """The answer with these rows, by user key."""
    kvs = [kvrpcpb_pb2.KvPair(key=codec.rpc_key(key), value=value) for key, value in rows]
    return kvrpcpb_pb2.RawScanResponse(kvs=kvs).SerializeToString()


def page_of(rows: Rows, codec: KeyCodec = V1) -> RawPage:
    """The same, measured."""
    page = measure(serialized(rows, codec))
    assert page is not None
    return page


def pages_of(rows: Rows, cuts: set[int]) -> list[Rows]:
    """The rows in pages that end at these places."""
    ends = sorted({cut for cut in cuts if 0 < cut < len(rows)} | {len(rows)})
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def column(rows: Rows, at: int) -> pa.LargeBinaryArray:
    """Keys or values."""
    return columns.from_list([row[at] for row in rows])


@given(tables, st.sets(st.integers(1, 60), max_size=4), codecs, codecs, st.integers(1, 2**64 - 1), st.integers(2, 5))
def test_pages_make_the_table_that_records_make(
    rows: Rows, cuts: set[int], source: KeyCodec, target: KeyCodec, ts: int, version: int
) -> None:
    """In every API version and format version, byte for byte, with the checksums of both sides."""
    options = SstOptions(Compression.NONE, format_version=version, block_size=1024, restart_interval=3)
    ours: list[bytes] = []
    theirs: list[bytes] = []
    by_page, by_record = SstWriter(ours.append, options), SstWriter(theirs.append, options)
    for part in pages_of(rows, cuts):
        folded = by_page.append_page(page_of(part, source), source, target, ts)
        keys, values = column(part, 0), column(part, 1)
        by_record.append(to_storage(columns.records(keys, values), target, ts))
        prefixes = (target.prefix, source.prefix)
        assert tuple(folded.checksum(prefix) for prefix in prefixes) == checksums(keys, values, prefixes)
    assert by_page.finish() == by_record.finish()
    assert b"".join(ours) == b"".join(theirs)


def test_rows_of_all_sizes() -> None:
    """Keys and values of megabytes between small ones, in one page and in pages of their own, come out as records do."""
    large, long = b"v" * (3 << 20), b"d" * 70_000
    rows = [(b"a", b""), (b"b", large), (b"c", b"1"), (long, b"2"), (long + b"x", large), (b"e", b"3")]
    for part in (pages_of(rows, set()), pages_of(rows, set(range(6)))):
        ours: list[bytes] = []
        theirs: list[bytes] = []
        by_page, by_record = SstWriter(ours.append, TIGHT), SstWriter(theirs.append, TIGHT)
        for each in part:
            by_page.append_page(page_of(each), V1, V2)
            by_record.append(to_storage(columns.records(column(each, 0), column(each, 1)), V2))
        assert by_page.finish() == by_record.finish()
        assert b"".join(ours) == b"".join(theirs)


def test_wrong_order_is_refused_by_name() -> None:
    """Within a page, and from one page to the next."""
    for pages in ([[(b"b", b""), (b"a", b"")]], [[(b"b", b"")], [(b"a", b"")]], [[(b"b", b"")], [(b"b", b"")]]):
        writer = SstWriter(lambda _: None, TIGHT)
        wrong = pages[-1][-1][0].hex()
        for rows in pages[:-1]:
            writer.append_page(page_of(rows), V1, V1)
        with pytest.raises(UnsortedKeys, match=f"key 7a{wrong} does not sort after 7a62"):
            writer.append_page(page_of(pages[-1]), V1, V1)


@pytest.mark.parametrize("stray", [b"r\0\0\2key", b"x\0\0\1key", b"r\0"])
def test_keys_of_another_keyspace_are_refused(stray: bytes) -> None:
    """Wherever in the page they are."""
    source = KeyCodec(ApiVersion.V2, 1)
    good = source.rpc_key(b"a")
    for rows in ([(stray, b"")], [(good, b""), (stray, b"")]):
        with pytest.raises(DamagedBytes):
            SstWriter(lambda _: None, TIGHT).append_page(page_of(rows), source, V2)


@given(tables, st.data(), codecs, codecs)
def test_a_page_that_is_not_the_measured_one_touches_nothing_else(
    rows: Rows, draw: st.DataObject, source: KeyCodec, target: KeyCodec
) -> None:
    """Whatever bytes lie where a page was measured, the kernel makes rows of them or raises, and writes within its bounds."""
    data, page = serialized(rows, source), page_of(rows, source)
    start = draw.draw(st.integers(0, len(data)))
    other = (data[:start] + draw.draw(st.binary(max_size=40)) + data[start:])[: draw.draw(st.integers(0, len(data)))]
    form, fence = page_encoding(source, target, 1), 64
    fold_space = np.full(page.longest + 2 * fence, 0xEE, np.uint8)
    odd_space = np.ones(page.longest + 1 + 2 * fence, np.bool_)
    folded, odd = fold_space[fence:-fence], odd_space[fence:-fence]
    writer = SstWriter(lambda _: None, SstOptions(block_size=1024, restart_interval=3))
    with contextlib.suppress(FormatError):
        writer._run(
            lambda blocks: encode_page(blocks, columns.from_bytes(other), form, folded, odd),
            int(largest_key(page.longest_key)),
        )
    assert set(fold_space[:fence]) == set(fold_space[-fence:]) == {0xEE}
    assert odd_space[:fence].all()
    assert odd_space[-fence:].all()
