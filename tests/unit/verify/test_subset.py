"""Parts of a backup's files."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.files import FileEntry
from tikv_br.errors import UsageError
from tikv_br.verify.options import Subset

NAMES = st.lists(st.text("abcdef", min_size=1), unique=True, max_size=40)
SEEDS = st.integers(0, 2**32)


def files(names: list[str]) -> list[FileEntry]:
    """Files of those names."""
    return [
        FileEntry(name=name, size=1, start_key=b"", end_key=b"", crc64xor=0, total_kvs=1, total_bytes=1)
        for name in names
    ]


@pytest.mark.parametrize("text", ["", "10", "0%", "101%", "-5%", "0/4", "5/4", "1/0", "1/", "x%", "1e1%", " 10%"])
def test_nonsense_is_refused(text: str) -> None:
    """Anything but a percentage above 0 up to 100 or a part K of N is a usage error that shows both forms."""
    with pytest.raises(UsageError, match=r"10%.*3/10"):
        Subset.parse(text)


@pytest.mark.parametrize("text", ["10%", "0.5%", "100%", "12.25%", "3/10", "1/2"])
def test_a_subset_is_shown_as_it_was_said(text: str) -> None:
    """The summary repeats the option."""
    assert str(Subset.parse(text)) == text


@given(NAMES, SEEDS, st.integers(1, 12))
def test_all_parts_together_are_all_files_each_once(names: list[str], seed: int, parts: int) -> None:
    """The subsets 1/N to N/N contain every file exactly once; their sizes differ by one at most."""
    whole = files(names)
    chosen = [Subset.parse(f"{part}/{parts}").choose(whole, seed) for part in range(1, parts + 1)]
    assert sorted(file.name for part in chosen for file in part) == sorted(names)
    assert max(map(len, chosen)) - min(map(len, chosen)) <= 1


@given(NAMES, SEEDS, st.integers(1, 100))
def test_a_percentage_is_rounded_up(names: list[str], seed: int, percent: int) -> None:
    """There are as many files as was said, never fewer, and at least one; they keep their order."""
    chosen = [file.name for file in Subset.parse(f"{percent}%").choose(files(names), seed)]
    assert len(chosen) == math.ceil(len(names) * percent / 100)
    assert chosen == [name for name in names if name in chosen]


def test_the_seed_decides() -> None:
    """The same seed chooses the same files in whatever order they are listed; seeds in a row reach every file."""
    whole = files([f"file{number}" for number in range(50)])
    tenth = Subset.parse("10%")
    assert {file.name for file in tenth.choose(whole, 7)} == {file.name for file in tenth.choose(whole[::-1], 7)}
    assert {file.name for seed in range(200) for file in tenth.choose(whole, seed)} == {file.name for file in whole}
