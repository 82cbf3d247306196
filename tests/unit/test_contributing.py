"""What CONTRIBUTING.md and SECURITY.md name is there."""

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


def test_each_row_of_who_can_write_where_names_its_tests() -> None:
    """And they exist."""
    _, _, rest = (ROOT / "SECURITY.md").read_text().partition("### Who can write where")
    table, _, _ = rest.partition("###")
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 10
    assert all(named)
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    wanted = {name for names in named for name in names} | set(re.findall(r"`(test_\w+)`", table))
    assert {name for name in wanted if f"def {name}(" not in everything} == set()
