"""The walks through the code in CONTRIBUTING.md."""

from __future__ import annotations

import re

import pytest

from tests.support.tools import ROOT

MOST_FILES_OF_A_KEY = 20
WALKS = ("A key", "A change", "A flag", "A test")


def files_of(walk: str) -> list[str]:
    """Return the files that a walk names, in order."""
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition(f"**{walk}**")
    steps, _, _ = rest.partition("**") if walk != WALKS[-1] else rest.partition("## ")
    return re.findall(r"`([\w/]+\.(?:py|md))`", steps)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_existing_files_once(walk: str) -> None:
    """A file that was moved or removed is noticed."""
    files = files_of(walk)
    assert len(files) > 3
    assert len(files) == len(set(files))
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_a_key_passes_few_files() -> None:
    """The bulk path stays short enough to be read."""
    assert len(files_of("A key")) <= MOST_FILES_OF_A_KEY
