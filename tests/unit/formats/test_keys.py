from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.examples import keys, keyspaces, many, timestamps
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.codec import MAX_KEYSPACE, KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, middle_key

V1, V1TTL, V2 = (KeyCodec(api_version) for api_version in ApiVersion)
TXN = KeyCodec(ApiVersion.V1, mode=KeyMode.TXN)
codecs = st.sampled_from([V1, V1TTL, TXN]) | st.builds(
    KeyCodec, st.just(ApiVersion.V2), keyspaces, st.sampled_from(KeyMode)
)
"""Codecs of any API version and keyspace."""


def test_known_forms_of_v2() -> None:
    """The forms of one key of keyspace 4242 are those that real servers showed."""
    codec = KeyCodec(ApiVersion.V2, 4242)
    rpc = codec.rpc_key(b"big/r")
    assert rpc.hex() == "720010926269672f72"
    assert codec.bound(rpc).hex() == "720010926269672fff7200000000000000f8"
    assert codec.storage_key(rpc, 2).hex() == "720010926269672fff7200000000000000f8fffffffffffffffd"


def test_keys_before_v2_have_one_form() -> None:
    """V1 and V1TTL keys are the same bytes everywhere, and have no ts in storage."""
    for codec in (V1, V1TTL):
        forms = codec.rpc_key(b"k"), codec.user_key(b"k"), codec.bound(b"k"), codec.from_bound(b"k")
        assert set(forms) == {b"k"}
        assert codec.storage_key(b"k", 7) == b"k"
        assert codec.parse_storage_key(b"k") == (b"k", 0)
        assert codec.rpc_range() == EVERY_KEY


@pytest.mark.parametrize(
    ("keyspace", "start", "end", "expected"),
    [
        (0, b"", b"", (b"r\0\0\0", b"r\0\0\1")),
        (255, b"a", b"b", (b"r\0\0\xffa", b"r\0\0\xffb")),
        (255, b"a", b"", (b"r\0\0\xffa", b"r\0\1\0")),
        (MAX_KEYSPACE, b"", b"", (b"r\xff\xff\xff", b"s")),
    ],
)
def test_ranges_of_v2_have_both_ends(keyspace: int, start: bytes, end: bytes, expected: tuple[bytes, bytes]) -> None:
    """An open range ends where the keyspace does; the last keyspace ends at the one form that servers accept."""
    assert KeyCodec(ApiVersion.V2, keyspace).rpc_range(KeyRange(start, end)) == KeyRange(*expected)


def test_transactional_keys() -> None:
    """They are encoded in every API version, and have a prefix in V2: the forms in files of real servers."""
    assert TXN.rpc_key(b"k") == b"k"
    assert TXN.bound(b"k").hex() == "6b00000000000000f8"
    assert TXN.storage_key(b"k", 2).hex() == "6b00000000000000f8fffffffffffffffd"
    assert TXN.bound(b"") == b""
    assert KeyCodec(ApiVersion.V2, 3, KeyMode.TXN).rpc_range() == KeyRange(b"x\0\0\3", b"x\0\0\4")
    assert KeyCodec(ApiVersion.V2, MAX_KEYSPACE, KeyMode.TXN).rpc_range() == KeyRange(b"x\xff\xff\xff", b"y")


def test_no_bound_stays_no_bound() -> None:
    """The empty bound means "unbounded" and never becomes the encoding of an empty string."""
    assert V2.bound(b"") == b""
    assert V2.from_bound(b"") == b""


@many(2)
@given(codecs, keys(), timestamps)
def test_round_trip(codec: KeyCodec, user: bytes, ts: int) -> None:
    """A user key comes back from its RPC form, its bound (also with a ts behind it) and its storage form."""
    rpc = codec.rpc_key(user)
    assert codec.user_key(rpc) == user
    assert codec.from_bound(codec.bound(rpc)) == rpc
    stored = codec.storage_key(rpc, ts)
    if codec.is_encoded:
        assert codec.parse_storage_key(stored) == (rpc, ts)
        assert codec.from_bound(stored) == rpc
    else:
        assert codec.parse_storage_key(stored) == (rpc, 0)


@many(2)
@given(keyspaces, keys(20), keys(20), timestamps, timestamps)
def test_storage_order_is_by_key_then_newest_first(keyspace: int, one: bytes, other: bytes, a: int, b: int) -> None:
    """Storage keys of V2 sort by user key, and the versions of one key by descending ts."""
    codec = KeyCodec(ApiVersion.V2, keyspace)
    for key in (other, one):
        before = codec.storage_key(codec.rpc_key(one), a) < codec.storage_key(codec.rpc_key(key), b)
        assert before == ((one, -a) < (key, -b))


@many(2)
@given(codecs, keys(12), keys(12), keys(12))
def test_ranges_hold_the_same_keys_in_every_form(codec: KeyCodec, start: bytes, end: bytes, key: bytes) -> None:
    """A key lies in a user range just when its RPC form lies in the RPC range and its bound between the bounds."""
    inside = start <= key and (not end or key < end)
    span = codec.rpc_range(KeyRange(start, end))
    low, high = span.start, span.end
    rpc = codec.rpc_key(key)
    assert (low <= rpc and (not high or rpc < high)) == inside
    assert (codec.bound(low) <= codec.bound(rpc) and (not high or codec.bound(rpc) < codec.bound(high))) == inside


@many(1)
@given(keyspaces, keyspaces, keys())
def test_keyspaces_do_not_mix(mine: int, other: int, key: bytes) -> None:
    """A key of another keyspace lies outside the keyspace's range and is refused as a user key."""
    codec = KeyCodec(ApiVersion.V2, mine)
    rpc = KeyCodec(ApiVersion.V2, other).rpc_key(key)
    whole = codec.rpc_range()
    assert (whole.start <= rpc < whole.end) == (mine == other)
    if mine != other:
        with pytest.raises(DamagedBytes, match=rpc.hex()):
            codec.user_key(rpc)


@many(1)
@given(keys(50))
def test_only_canonical_storage_keys_parse(data: bytes) -> None:
    """Any bytes are either refused as a storage key of V2 or are the one form of what comes out."""
    try:
        rpc, ts = V2.parse_storage_key(data)
    except DamagedBytes:
        return
    assert V2.storage_key(rpc, ts) == data


def test_impossible_keyspaces_are_refused() -> None:
    """Ids beyond three bytes, and any but 0 before V2, do not make a codec."""
    for api_version, keyspace in ((ApiVersion.V2, -1), (ApiVersion.V2, 1 << 24), (ApiVersion.V1TTL, 1)):
        with pytest.raises(UnsupportedFormat, match=str(keyspace)):
            KeyCodec(api_version, keyspace)


@given(low=st.binary(max_size=20), high=st.binary(max_size=20))
def test_a_middle_lies_between(low: bytes, high: bytes) -> None:
    """Above the lower key, not above the higher; none where there is no room."""
    middle = middle_key(low, high)
    assert (middle is None) == (low >= high)
    assert middle is None or low < middle <= high


def test_middles_halve() -> None:
    """Keys with a long common head are halved where they differ."""
    chance = random.Random(5)
    keys = sorted({b"users/by-id/" + chance.randbytes(8) for _ in range(1000)})
    middle = middle_key(keys[0], keys[-1])
    assert middle is not None
    assert 400 < sum(key < middle for key in keys) < 600
