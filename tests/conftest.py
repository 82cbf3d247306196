"""Fixtures and settings that every tier shares."""

from __future__ import annotations

import os
import re
from pathlib import Path

import hypothesis
import pytest

from tests.tools import ROOT, missing

TIERS = ("unit", "golden", "integration", "interop", "e2e")

# A deadline measures the machine, not the code. CI looks further than a developer's quick run, and at codecs much further.
OF_THE_MACHINE = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("quick", deadline=None, max_examples=200, suppress_health_check=OF_THE_MACHINE)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=400, print_blob=True, suppress_health_check=OF_THE_MACHINE
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "quick"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier: the folder it lives in."""
    for item in items:
        parts = item.path.relative_to(ROOT).parts
        if len(parts) > 1 and parts[1] in TIERS:
            item.add_marker(parts[1])


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of data recorded from real servers: ``TIKV_BR_GOLDEN``, or ``shared/golden`` beside a parent."""
    named = os.environ.get("TIKV_BR_GOLDEN")
    places = [Path(named)] if named else [parent / "shared" / "golden" for parent in ROOT.parents]
    path = next((place for place in places if place.is_dir()), None)
    if path is None:
        missing(f"no golden data at {', '.join(map(str, places))}: set TIKV_BR_GOLDEN")
    return path


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own settings and credentials out of every test."""
    for name in list(os.environ):
        if re.match(r"(TIKV_BR_(?!GOLDEN)|AWS_)", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
