"""Conversions and feature gates."""

from __future__ import annotations

import itertools

import pytest

from tikv_br.backup.options import (
    BACKUP_TS,
    CHECKSUM,
    CONVERSION,
    Feature,
    Loss,
    parse_version,
    require_conversion,
    require_feature,
)
from tikv_br.errors import ClusterUnfit, ConversionUnsupported
from tikv_br.formats.api_version import ApiVersion

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
LOSES = {(V1TTL, V1): "ttl", (V2, V1): "ttl,ts,keyspace", (V2, V1TTL): "ts,keyspace"}
"""All that lose anything, of nine."""


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ApiVersion, ApiVersion)))
def test_a_conversion_that_loses_something_must_be_allowed_all_of_it(source: ApiVersion, target: ApiVersion) -> None:
    """Six of the nine pairs lose nothing; the others name versions, what would be lost, and the flag that allows it."""
    lost = LOSES.get((source, target), "")
    if not lost:
        require_conversion(source, target)
        return
    needed = {Loss(word) for word in lost.split(",")}
    require_conversion(source, target, needed)
    for allowed in ((), set(Loss) - {min(needed)}):
        with pytest.raises(ConversionUnsupported) as raised:
            require_conversion(source, target, allowed)
        assert f"API {source.label} as API {target.label} loses" in raised.value.message
        assert all(f"{loss.meaning} ({loss.value})" in raised.value.message for loss in needed)
        assert f"--allow-loss {lost}" in raised.value.hint


@pytest.mark.parametrize(
    ("version", "feature", "fits"),
    [
        ("6.0.9", CONVERSION, False),
        ("6.1.0", CONVERSION, True),
        ("6.1.0", CHECKSUM, False),
        ("6.1.1", CHECKSUM, True),
        ("6.1.9", BACKUP_TS, False),
        ("6.2.0-alpha", BACKUP_TS, True),
        ("9.0.0-beta.2", BACKUP_TS, True),
        ("10.0.0", BACKUP_TS, True),
    ],
)
def test_features_are_gated_by_cluster_version(version: str, feature: Feature, fits: bool) -> None:
    """Versions compare as numbers, and a pre-release counts as its release."""
    if fits:
        require_feature(version, feature)
    else:
        with pytest.raises(ClusterUnfit, match=version.replace(".", r"\.")):
            require_feature(version, feature)


def test_versions_come_in_several_forms() -> None:
    """PD quotes its version in JSON and stores may write a v before it; anything else is said to be no version."""
    assert parse_version('"8.5.2"') == parse_version("v8.5.2") == parse_version("8.5.2-nightly+x") == (8, 5, 2)
    with pytest.raises(ClusterUnfit, match="unknown"):
        parse_version("unknown")
