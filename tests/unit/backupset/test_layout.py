from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset import layout
from tikv_br.backupset.files import FileKind
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import check_name

RANGES = st.builds(KeyRange, st.binary(max_size=4), st.binary(max_size=4))


@given(RANGES, RANGES)
def test_intervals_have_names_of_their_own(one: KeyRange, other: KeyRange) -> None:
    """Two intervals have one name only if they are the same: start and end do not run into each other."""
    assert (layout.interval_id(one) == layout.interval_id(other)) == (one == other)


@given(RANGES, st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True), st.integers(0, 99_999))
def test_names_are_names(interval: KeyRange, attempt: str, number: int) -> None:
    """Every name is one that stores accept; SSTs say their column family, as the Go tool reads it from the name."""
    sst = check_name(layout.data_name(FileKind.SST, interval, attempt, number))
    assert "default" in sst
    assert "write" not in sst
    assert sst.endswith(".sst")
    parquet = check_name(layout.data_name(FileKind.PARQUET, interval, attempt, number))
    assert (FileKind.of(sst), FileKind.of(parquet), FileKind.of(layout.META)) == (FileKind.SST, FileKind.PARQUET, None)
    assert check_name(layout.ledger_name(interval, attempt)).startswith(f"{layout.LEDGER}/")
