from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stored_values import encode_value
from tests.unit.formats.examples import expiries, keys, many
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.values import StoredValue, decode_value


@pytest.mark.parametrize(
    ("api_version", "data"),
    [
        (ApiVersion.V1TTL, "00000000000000"),
        (ApiVersion.V2, ""),
        (ApiVersion.V2, "04"),
        (ApiVersion.V2, "80"),
        (ApiVersion.V2, "0000000000000001"),
        (ApiVersion.V2, "000000000000000001"),
    ],
)
def test_damage_is_refused(api_version: ApiVersion, data: str) -> None:
    """Bytes too short for what their version or flags promise, unknown flags, and an expiry at 0 are refused."""
    with pytest.raises(DamagedBytes, match="stored value"):
        decode_value(api_version, bytes.fromhex(data))


@pytest.mark.parametrize(
    ("api_version", "stored"),
    [
        (ApiVersion.V1, StoredValue(b"", 1)),
        (ApiVersion.V1, StoredValue(b"", 0, deleted=True)),
        (ApiVersion.V1TTL, StoredValue(b"", 0, deleted=True)),
    ],
)
def test_fields_that_a_version_lacks_are_refused(api_version: ApiVersion, stored: StoredValue) -> None:
    """An expiry in V1, or a tombstone before V2, is an error and not dropped."""
    with pytest.raises(UnsupportedFormat, match=f"API {api_version.label}"):
        encode_value(api_version, stored)


def test_live_values() -> None:
    """An expiry equal to now is over; 0 never comes; a tombstone is not read."""
    assert StoredValue(b"").is_live(99)
    assert StoredValue(b"", 100).is_live(99)
    assert not StoredValue(b"", 99).is_live(99)
    assert not StoredValue(b"", 0, deleted=True).is_live(99)


@many(1)
@given(keys(20), expiries, st.booleans())
def test_round_trip(value: bytes, expire_ts: int, deleted: bool) -> None:
    """V2 holds all of a stored value, V1TTL all but tombstones, V1 the value alone."""
    for stored, api_version in (
        (StoredValue(value, expire_ts, deleted), ApiVersion.V2),
        (StoredValue(value, expire_ts), ApiVersion.V1TTL),
        (StoredValue(value), ApiVersion.V1),
    ):
        assert decode_value(api_version, encode_value(api_version, stored)) == stored


@many(1)
@given(keys(20), st.sampled_from(ApiVersion))
def test_only_canonical_bytes_decode(data: bytes, api_version: ApiVersion) -> None:
    """Any bytes are either refused or the one form of what comes out."""
    try:
        stored = decode_value(api_version, data)
    except DamagedBytes:
        return
    assert encode_value(api_version, stored) == data
