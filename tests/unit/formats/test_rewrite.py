"""Rewritten prefixes, key by key against what encoded keys look like."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec, successor
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite, can_stores_rewrite, encoded_prefix

V1, V2 = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2)
PREFIXES = st.binary(max_size=20)
RESTS = st.binary(max_size=20)


@given(PREFIXES, PREFIXES, RESTS)
def test_stores_can_where_the_encoded_rest_stays_as_it_is(old: bytes, new: bytes, rest: bytes) -> None:
    """Replacing the encoded prefix gives the encoded new key, for every key, exactly where `can_stores_rewrite` says so."""
    encoded_old, encoded_new = (encoded_prefix(ApiVersion.V2, prefix) for prefix in (old, new))
    encoded = V2.bound(old + rest) or b""
    assert encoded.startswith(encoded_old)
    if can_stores_rewrite(ApiVersion.V2, Rewrite.of(V1, old, V1, new)) and old + rest and new + rest:
        assert encoded_new + encoded[len(encoded_old) :] == V2.bound(new + rest)


def test_stores_cannot_shift_the_groups_of_v2() -> None:
    """Lengths that differ by other than whole groups are no matter for stores of V1, and none for those of V2."""
    assert can_stores_rewrite(ApiVersion.V1, Rewrite.of(V1, b"a", V1, b"abc"))
    assert not can_stores_rewrite(ApiVersion.V2, Rewrite.of(V1, b"a", V1, b"abc"))
    assert can_stores_rewrite(ApiVersion.V2, Rewrite.of(V1, b"a", V1, b"a" * 9))


@given(PREFIXES, PREFIXES, RESTS, RESTS, RESTS)
def test_a_rewritten_range_holds_exactly_the_rewritten_keys(
    old: bytes, new: bytes, one: bytes, other: bytes, rest: bytes
) -> None:
    """A key with the old prefix lies in a range if and only if the new key lies in the new range."""
    rewrite = Rewrite.of(V1, old, V1, new)
    low, high = sorted((one, other))
    for span in (KeyRange(old + low, old + high), KeyRange(old + low, successor(old)), rewrite.source):
        if not span.is_empty:
            assert inside(old + rest, span) == inside(new + rest, rewrite.range(span))
            assert rewrite.reversed.range(rewrite.range(span)) == span


def inside(key: bytes, span: KeyRange) -> bool:
    """What a range means, said the long way."""
    return key >= span.start and (span.end == b"" or key < span.end)


def test_the_end_of_a_keyspace_is_bare() -> None:
    """Not encoded: the encoded bound of the next keyspace does not begin with the new prefix, and a store refuses it."""
    rewrite = Rewrite.of(V2, b"", KeyCodec(ApiVersion.V2, 0x1092), b"")
    whole = rewrite.range(KeyRange(b"r\0\0\0", b"r\0\0\1"))
    assert whole == KeyRange(b"r\0\x10\x92", b"r\0\x10\x93")
    assert rewrite.storage_range(V2, whole) == KeyRange(V2.bound(b"r\0\x10\x92"), b"r\0\x10\x93")
    cut = KeyRange(b"r\0\x10\x92a", b"r\0\x10\x92b")
    assert rewrite.storage_range(V2, cut) == KeyRange(V2.bound(cut.start), V2.bound(cut.end))
    assert UNCHANGED.storage_range(V2, whole) == KeyRange(V2.bound(whole.start), V2.bound(whole.end))


@pytest.mark.parametrize("keyspace_id", [0, 255, 0xFFFF, 0xFFFFFF])
def test_a_whole_keyspace_ends_where_keyspaces_end(keyspace_id: int) -> None:
    """The end is the one that the codec says, and is no user key, also where the id's last byte is the largest."""
    codec = KeyCodec(ApiVersion.V2, keyspace_id)
    whole = codec.rpc_range()
    moved = Rewrite.of(V2, b"", codec, b"")
    assert moved.range(V2.rpc_range()) == whole
    assert Rewrite.of(codec, b"", V2, b"").source == whole
    assert codec.user_range(Rewrite.of(V2, b"old", codec, b"\xff").target) == KeyRange(b"\xff", b"")


def test_records_get_their_new_names() -> None:
    """Those with the old prefix, and only they, come out under the new one, across keyspaces."""
    keys = [b"", b"ol", b"old", b"old1", b"older", b"z"]
    rows = {"key": keys, "value": keys, "expire_ts": [0] * 6, "ts": [5] * 6, "deleted": [False] * 6}
    batch = pa.RecordBatch.from_pydict(rows, SCHEMA)
    source, target = KeyCodec(ApiVersion.V2, 0), KeyCodec(ApiVersion.V2, 7)
    moved = Rewrite.of(source, b"old", target, b"new/").apply(batch, source, target)
    assert moved["key"].to_pylist() == [b"new/", b"new/1", b"new/er"]
    assert moved["value"].to_pylist() == [b"old", b"old1", b"older"]
    assert moved.schema == SCHEMA
    assert UNCHANGED.apply(batch, source, source).equals(batch)
    assert Rewrite.of(source, b"", target, b"").apply(batch, source, target).equals(batch)
