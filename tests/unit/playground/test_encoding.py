"""Twin of tikv_br/playground/encoding.py: compared with ``formats``, which was written apart from it, and with a model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.stored_values import encode_value
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.values import StoredValue
from tikv_br.playground.encoding import DeadlyData, encoding_of
from tikv_br.playground.engine import RocksEngine

NOW = 1_800_000_000
USER_KEYS = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"\x00" * 8, b"\xff" * 9, b"abcdefgh"]))
EXPIRIES = st.sampled_from([0, NOW - 1, NOW, NOW + 1, (1 << 64) - 1])


@given(user=USER_KEYS, value=st.binary(max_size=40), expire=EXPIRIES, ts=st.integers(1, (1 << 64) - 1))
@pytest.mark.parametrize("api_version", list(ApiVersion))
def test_rows_equal_those_of_formats(api_version: ApiVersion, user: bytes, value: bytes, expire: int, ts: int) -> None:
    """A put's row, a tombstone and a bound are what the other implementation makes of the same pair."""
    codec, encoding = KeyCodec(api_version), encoding_of(api_version)
    expire = expire if api_version.has_ttl else 0
    key = codec.rpc_key(user)
    data_key = DATA_PREFIX + codec.storage_key(key, ts)
    assert encoding.put(key, value, expire, ts) == (data_key, encode_value(api_version, StoredValue(value, expire)))
    assert encoding.bound(key) == codec.bound(key)
    assert encoding.split_key(data_key) == codec.bound(key)
    puts, deletes = encoding.delete(key, ts)
    if api_version is ApiVersion.V2:
        assert (puts, deletes) == ([(data_key, encode_value(api_version, StoredValue(b"", 0, deleted=True)))], [])
    else:
        assert (puts, deletes) == ([], [data_key])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    operations=st.lists(st.tuples(USER_KEYS, st.one_of(st.none(), st.binary(max_size=8)), EXPIRIES), max_size=30),
    bounds=st.tuples(USER_KEYS, USER_KEYS),
)
@pytest.mark.parametrize("api_version", list(ApiVersion))
def test_reads_agree_with_a_dictionary(
    engine: RocksEngine,
    api_version: ApiVersion,
    operations: list[tuple[bytes, bytes | None, int]],
    bounds: tuple[bytes, bytes],
) -> None:
    """After any puts (with expiries), overwrites and deletes, point reads and scans see what a dictionary holds."""
    encoding, codec = encoding_of(api_version), KeyCodec(api_version)
    engine.delete_range(b"", b"")
    model: dict[bytes, tuple[bytes, int]] = {}
    for ts, (user, value, expire) in enumerate(operations, start=1):
        key = codec.rpc_key(user)
        if value is None:
            engine.write(*encoding.delete(key, ts))
            model.pop(key, None)
        else:
            expiry = expire if api_version.has_ttl else 0
            engine.write([encoding.put(key, value, expiry, ts)])
            model[key] = (value, expiry)
    live = {key: value for key, (value, expire) in model.items() if expire == 0 or expire > NOW}
    start, end = (codec.rpc_key(user) for user in sorted(bounds))
    inside = [(key, live[key]) for key in sorted(live) if start <= key < end]
    physical = codec.bound(start), codec.bound(end)
    if start < end:
        assert list(encoding.live(engine, *physical, now=NOW)) == inside
        assert list(encoding.live(engine, *physical, now=NOW, reverse=True)) == inside[::-1]
    for user, _, _ in operations:
        key = codec.rpc_key(user)
        stored = encoding.newest(engine, key)
        assert (stored.value if stored and stored.is_live(NOW) else None) == live.get(key)


@pytest.mark.parametrize(
    ("api_version", "stored"),
    [(ApiVersion.V2, b""), (ApiVersion.V2, b"\x07"), (ApiVersion.V2, b"short\x01"), (ApiVersion.V1TTL, b"short")],
)
def test_values_that_kill_a_real_store_are_reported(
    engine: RocksEngine, api_version: ApiVersion, stored: bytes
) -> None:
    """A value without flags or expiry is invalid in that version: point reads and scans raise `DeadlyData`."""
    encoding = encoding_of(api_version)
    key = KeyCodec(api_version).rpc_key(b"k")
    engine.write([(encoding.data_key(key, 5), stored)])
    with pytest.raises(DeadlyData):
        encoding.newest(engine, key)
    with pytest.raises(DeadlyData):
        list(encoding.live(engine, b"", b"", now=NOW))


def test_timestamp_zero_is_invisible(engine: RocksEngine) -> None:
    """A V2 version of ts 0 cannot be read by key, as in TiKV."""
    encoding = encoding_of(ApiVersion.V2)
    engine.write([encoding.put(b"r\0\0\0k", b"v", 0, 0)])
    assert encoding.newest(engine, b"r\0\0\0k") is None
