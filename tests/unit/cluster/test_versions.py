"""Versions of stores: how they compare, and what is refused."""

from __future__ import annotations

import pytest

from tikv_br.cluster import versions
from tikv_br.cluster.topology import Store, StoreState
from tikv_br.cluster.versions import CAPABILITIES, Capability, Version, supports
from tikv_br.errors import ClusterUnfit


def _store(number: int, version: str) -> Store:
    return Store(number, f"10.0.0.{number}:20160", "", StoreState.UP, version)


def test_versions_are_in_semantic_order() -> None:
    """Pre-releases come before their release, numbers compare as numbers, and a build counts as its release."""
    ordered = ["5.4.3", "6.5.3", "v6.5.4", "6.10.0", "9.0.0-alpha", "9.0.0-beta.2", "9.0.0-beta.10", "9.0.0-rc.1"]
    ordered += ['"9.0.0"', "10.0.0"]
    assert sorted(map(Version.parse, reversed(ordered))) == [*map(Version.parse, ordered)]
    assert Version.parse("6.5.4-20230901-abc") == Version.parse("6.5.4+x") == Version(6, 5, 4)
    assert str(Version.parse("v9.0.0-beta.2")) == "9.0.0-beta.2"


@pytest.mark.parametrize("text", ["", "nightly", "6.5"])
def test_a_text_that_is_no_version_is_refused(text: str) -> None:
    """It is not taken for an old or a new version."""
    with pytest.raises(ClusterUnfit, match="cannot parse the version"):
        Version.parse(text)


@pytest.mark.parametrize(
    ("capability", "lacking", "having"),
    [
        (versions.RAW, "5.3.9", "5.4.0"),
        (versions.CHECKSUMS, "6.1.0", "6.1.1"),
        (versions.API_V2, "6.1.7", "6.2.0"),
        (versions.FEED, "6.2.0-alpha", "6.2.0"),
        (versions.EXPIRY_PROPERTIES, "6.5.3", "6.5.4"),
        (versions.EXPIRY_PROPERTIES, "6.6.0", "6.5.12"),
        (versions.EXPIRY_PROPERTIES, "7.1.1", "7.1.2"),
        (versions.EXPIRY_PROPERTIES, "7.2.0", "7.3.0"),
        (versions.LIMIT_TTL, "9.0.0", None),
    ],
)
def test_capabilities_follow_release_lines(capability: Capability, lacking: str, having: str | None) -> None:
    """A patch release can have what a newer minor version lacks."""
    assert not supports(lacking, capability)
    assert having is None or supports(having, capability)


def test_one_old_store_is_named_with_the_version_that_it_needs() -> None:
    """The other stores do not hide it."""
    stores = [_store(1, "8.5.7"), _store(4, "6.1.7"), _store(5, "8.5.7")]
    versions.require(stores, versions.CHECKSUMS)
    with pytest.raises(ClusterUnfit) as refused:
        versions.require(stores, versions.FEED)
    assert refused.value.exit_code == 5
    assert "a change feed needs TiKV 6.2.0 or newer; store 4 (10.0.0.4:20160) has version 6.1.7" in str(refused.value)
    assert "--skip-version-check" in refused.value.hint


def test_newer_versions_and_a_skipped_check_are_reported() -> None:
    """Neither stops anything."""
    assert versions.notices([_store(1, "9.0.0-beta.2"), _store(2, "5.4.0")]) == []
    (newer,) = versions.notices([_store(1, "10.1.0"), _store(2, "10.1.0")])
    assert "10.1.0 is newer than 9.0.0-beta.2" in newer
    (skipped,) = versions.notices([_store(1, "6.0.0"), _store(2, "?")], skipped=True)
    assert "6.0.0" in skipped


def test_a_target_that_does_not_drop_late_requests_is_reported() -> None:
    """The notice names the version and what happens; newer stores cause none."""
    (text,) = versions.shortcomings([_store(1, "8.5.7"), _store(2, "6.2.0")], versions.WRITE_DEADLINE)
    assert "TiKV 6.2.0 lacks the deadline of raw writes, which needs 6.3.0: a store may execute a request late" in text


def test_every_capability_says_what_older_versions_do() -> None:
    """Either they are refused, which needs a first version, or the difference is described."""
    assert len({each.name for each in CAPABILITIES}) == len(CAPABILITIES)
    assert all(each.older or each.since for each in CAPABILITIES)
