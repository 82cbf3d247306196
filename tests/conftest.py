"""Fixtures and settings that every tier shares."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.browser import Page, browser
from tests.support.tools import ROOT, unpack_golden
from tikv_br import cancellation
from tikv_br.storage import outage

TIERS = ("unit", "golden", "integration", "interop", "e2e")

# A deadline measures the machine, not the code.
OF_THE_MACHINE = [hypothesis.HealthCheck.too_slow]
for profile, examples in (("fast", 20), ("thorough", 100)):
    hypothesis.settings.register_profile(
        profile, deadline=None, max_examples=examples, print_blob=True, suppress_health_check=OF_THE_MACHINE
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


COLLECTED = pytest.StashKey[Iterable[pytest.Item]]()
"""All tests of a run, also those that its markers leave out."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark every test with its tier, the folder it lives in. Long ones run first, short ones last: all workers end at about the same time."""
    for item in items:
        if (tier := _tier(item)) in TIERS:
            item.add_marker(tier)
    config.stash[COLLECTED] = tuple(items)
    yield  # tests are selected and shuffled
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_tier(item) in {"unit", "golden"}, item.path not in long))


def _tier(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).parts[1]


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of data recorded from real servers: ``TIKV_BR_GOLDEN``, by default tests/data/golden unpacked."""
    named = os.environ.get("TIKV_BR_GOLDEN")
    if named is None:
        return unpack_golden()
    path = Path(named)
    if not path.is_dir():
        pytest.fail(f"TIKV_BR_GOLDEN={named} is not a folder: unset it to use the recording in tests/data/golden")
    return path


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Return a tab of a browser."""
    with browser() as page:
        yield page


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own settings and credentials out of every test."""
    for name in list(os.environ):
        if re.match(r"TIKV_BR_(?!GOLDEN)|AWS_|AZURE_|GOOGLE_|SPARK_|PYSPARK_|HADOOP_|JAVA_TOOL_OPTIONS|XDG_", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")


@pytest.fixture(autouse=True)
def log_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a command in this process sets: its handler writes to a stream that pytest closes, its levels show other tests' lines."""
    monkeypatch.setattr(logging.getLogger(), "handlers", logging.getLogger().handlers[:])
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("tikv_br").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def unknown_storages() -> None:
    """Forget which locations have answered, as in a new process: tests reuse ports."""
    outage._health.clear()


@pytest.fixture(autouse=True)
def clean_ups() -> None:
    """Forget, as in a new process, clean-ups that threads of a former test have not ended: they would hurry every call."""
    cancellation._clean_ups.clear()
