from __future__ import annotations

import zlib

import pyarrow as pa
import pytest

from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.errors import FormatError
from tikv_br.formats.loadgen import MAX_COUNT, generate


def table(*parts: list[pa.RecordBatch]) -> pa.Table:
    """The rows of all batches."""
    return pa.Table.from_batches([batch for part in parts for batch in part], SCHEMA).combine_chunks()


def test_keys_are_unique_and_ascend_with_the_row() -> None:
    """Keys are of one width, so that their order is the order of the numbers in them."""
    keys = table(list(generate(2000, 0, batch_rows=300, first=99_999_000)))["key"].to_pylist()
    assert keys == sorted(set(keys))
    assert keys[0] == b"key-000099999000"
    assert keys[-1] == b"key-000100000999"


def test_the_same_seed_gives_the_same_rows_in_any_pieces() -> None:
    """Neither the size of batches nor the row to begin with changes a row; another seed changes each value."""
    whole = table(list(generate(1000, 33, seed=7)))
    pieces = table(list(generate(400, 33, 7, batch_rows=64)), list(generate(600, 33, 7, batch_rows=1000, first=400)))
    assert pieces == whole
    other = table(list(generate(1000, 33, seed=8)))
    assert other["key"] == whole["key"]
    assert not any(one == two for one, two in zip(other["value"], whole["value"], strict=True))


@pytest.mark.parametrize("size", [0, 1, 2, 8, 15, 16, 17, 1024, 1 << 20])
def test_values_have_the_size_that_was_asked_for(size: int) -> None:
    """Every value has exactly `size` bytes, also sizes that fill no whole word."""
    values = table(list(generate(5, size, batch_rows=2)))["value"].to_pylist()
    assert [len(value) for value in values] == [size] * 5
    if size >= 16:
        assert len(set(values)) == 5


def test_values_compress_to_about_half() -> None:
    """One half of the bytes is noise to a compressor, the other next to nothing."""
    data = b"".join(table(list(generate(2000, 100, seed=3)))["value"].to_pylist())
    assert 0.48 < len(zlib.compress(data)) / len(data) < 0.56


def test_batches_are_as_large_as_asked() -> None:
    """Batches are full but for the last; none is empty."""
    assert [batch.num_rows for batch in generate(10, 4, batch_rows=4)] == [4, 4, 2]
    assert list(generate(0, 4)) == []


@pytest.mark.parametrize(
    ("count", "size", "batch_rows", "first"),
    [(-1, 0, 1, 0), (1, -1, 1, 0), (1, 0, 0, 0), (1, 0, 1, -1), (MAX_COUNT + 1, 0, 1, 0), (1, 0, 1, MAX_COUNT)],
)
def test_impossible_loads_are_refused(count: int, size: int, batch_rows: int, first: int) -> None:
    """Negative sizes, empty batches and rows beyond the width of keys are refused."""
    with pytest.raises(FormatError, match="cannot make"):
        next(generate(count, size, batch_rows=batch_rows, first=first))
