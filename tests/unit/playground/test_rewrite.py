from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.formats.keys import codec
from tikv_br.formats.keys.codec import successor
from tikv_br.playground.import_service import RangeRewrite, RewriteFault, WrongPrefix

FROM, TO = b"r\0\0\0", b"r\0\x10\x92"
KEYS = [codec.encode(FROM + name) + bytes(8) for name in (b"", b"a", b"long enough for groups", b"z")]


def rewrite(
    start: bytes = b"",
    end: bytes = b"",
    old: bytes = b"",
    new: bytes = b"",
    ts: int = 0,
    *,
    exclusive: bool = True,
    is_plain: bool = False,
) -> RangeRewrite:
    """A rule on a range."""
    rule = import_sstpb_pb2.RewriteRule(old_key_prefix=old, new_key_prefix=new, new_timestamp=ts)
    meta = import_sstpb_pb2.SSTMeta(range=import_sstpb_pb2.Range(start=start, end=end), end_key_exclusive=exclusive)
    return RangeRewrite.of(rule, meta, is_plain=is_plain)


def test_without_a_rule_only_the_range_counts() -> None:
    """Keys stay as they are; the end counts or not as the meta says; empty bounds are none."""
    assert not rewrite().changes_keys
    assert [rewrite(b"b", b"d").keeps(key) for key in (b"a", b"b", b"c", b"d", b"e")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert rewrite(b"b", b"d", exclusive=False).keeps(b"d")
    assert rewrite(b"b", b"d", exclusive=False).is_past(b"d\0")
    assert rewrite().keeps(b"")
    assert rewrite().keeps(b"\xff" * 20)
    assert rewrite(exclusive=False).keeps(b"\xff" * 20)


def test_a_keyspace_move() -> None:
    """Prefixes of four plain bytes work on memcomparable keys; the range is given in the target's keys."""
    start, end = codec.encode(TO + b"a"), codec.encode(TO + b"m")
    rule = rewrite(start, end, FROM, TO)
    assert rule.changes_keys
    assert [rule.keeps(key) for key in KEYS] == [False, True, True, False]
    moved = rule.apply(KEYS[2])
    assert codec.decode(moved)[0] == TO + b"long enough for groups"
    assert moved[-8:] == bytes(8)


def test_ranges_must_be_the_targets() -> None:
    """A range in the source's keys is refused, at either end; so is the memcomparable end of the keyspace."""
    with pytest.raises(WrongPrefix, match="SST start range has wrong prefix"):
        rewrite(codec.encode(FROM + b"a"), b"", FROM, TO)
    with pytest.raises(WrongPrefix, match="SST end range has wrong prefix"):
        rewrite(b"", codec.encode(FROM + b"z"), FROM, TO)
    with pytest.raises(WrongPrefix, match="SST end range"):
        rewrite(b"", codec.encode(b"r\0\x10\x93"), FROM, TO)


def test_the_successor_of_the_prefix_is_an_end() -> None:
    """The exact successor of the target's prefix stands for the end of all its keys, where ends are exclusive."""
    rule = rewrite(b"", b"r\0\x10\x93", FROM, TO)
    assert rule.end == b"r\0\0\1"
    assert all(rule.keeps(key) for key in KEYS)
    with pytest.raises(WrongPrefix):
        rewrite(b"", b"r\0\x10\x93", FROM, TO, exclusive=False)


TXN = b"x\0\0\2"


@pytest.mark.parametrize(("old", "new"), [(b"", TXN), (FROM, TXN), (FROM, b"")])
def test_prefixes_of_plain_keys(old: bytes, new: bytes) -> None:
    """Those of type ``Keyspace`` have any length; the range is of the target's plain keys, and its end may be the prefix's successor."""
    rule = rewrite(new + b"a", new + b"m", old, new, is_plain=True)
    keys = [codec.encode(old + name) + bytes(8) for name in (b"", b"a", b"long enough for groups", b"m", b"z")]
    assert [rule.keeps(key) for key in keys] == [False, True, True, False, False]
    assert rule.apply(keys[2]) == codec.encode(new + b"long enough for groups") + bytes(8)
    assert all(rewrite(b"", successor(new), old, new, is_plain=True).keeps(key) for key in keys)


def test_ranges_in_the_other_form() -> None:
    """Encoded bounds of plain prefixes, and the reverse: rows are lost, or those of the next region come in; or the bound is refused."""
    keys = [codec.encode(FROM + name) + bytes(8) for name in (b"\0", b"m")]
    encoded = rewrite(codec.encode(TXN + b"\0"), codec.encode(TXN + b"m"), FROM, TXN, is_plain=True)
    assert [encoded.keeps(key) for key in keys] == [False, True]
    plain = rewrite(TXN + b"\0", TXN + b"m", FROM, TXN)
    assert [plain.keeps(key) for key in keys] == [True, False]
    with pytest.raises(WrongPrefix, match="SST end range has wrong prefix"):
        rewrite(b"", codec.encode(successor(TXN)), FROM, TXN, is_plain=True)


def test_plain_prefixes_need_encoded_keys() -> None:
    """A file of raw keys of V1 cannot be rewritten so."""
    with pytest.raises(RewriteFault, match="Codec error"):
        rewrite(new=TXN, is_plain=True).apply(b"raw key of V1" + bytes(8))


def test_a_new_timestamp() -> None:
    """It replaces the last eight bytes, inverted, and nothing else."""
    rule = rewrite(ts=42)
    assert rule.changes_keys
    assert rule.apply(KEYS[1]) == KEYS[1][:-8] + bytes(7).replace(b"\0", b"\xff") + bytes([0xFF - 42])


def test_a_key_of_another_prefix_is_refused() -> None:
    """A file with a key that the rule cannot rewrite fails, naming the key."""
    with pytest.raises(WrongPrefix, match="Key in SST has wrong prefix: key 7801 does not start with 72000000"):
        rewrite(old=FROM, new=TO).apply(b"x\x01")


@given(st.binary(max_size=6), st.binary(max_size=8))
def test_the_successor_is_the_least_key_above(prefix: bytes, rest: bytes) -> None:
    """All keys of the prefix are below it, and nothing lies between."""
    above = successor(prefix)
    if above:
        assert prefix + rest < above
        assert not above.startswith(prefix)
        assert above[:-1] == prefix[: len(above) - 1]
    else:
        assert prefix.strip(b"\xff") == b""
