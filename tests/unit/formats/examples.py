"""Data for the codecs' property tests."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., None])

CI_EXAMPLES = 3000
"""``max_examples`` of the profile that CI runs (tests/conftest.py)."""
MAX_U64 = (1 << 64) - 1

_EDGES = b"\x00\xff\xf7\xf8\xfe\x01\x02\x03zr"


def many(weight: int) -> Callable[[Test], Test]:
    """Look at `weight` times the examples of the profile; `test_examples` adds the weights up."""
    return settings(max_examples=settings().max_examples * weight)


def _spiced(data: bytes) -> bytes:
    return bytes(_EDGES[byte % len(_EDGES)] for byte in data)


def keys(max_size: int = 40) -> st.SearchStrategy[bytes]:
    """Byte strings, every other one of the few bytes that mean something to an encoding."""
    return st.binary(min_size=1, max_size=max_size + 1).map(
        lambda data: _spiced(data[1:]) if data[0] & 1 else data[1:],
    )


u64 = st.integers(0, MAX_U64)
timestamps = st.integers(1, MAX_U64)
expiries = st.sampled_from([0, 1, 2, 2**32, MAX_U64]) | u64
keyspaces = st.sampled_from([0, 1, 4242, 0xFFFFFE, 0xFFFFFF])


class Row(NamedTuple):
    """A user record."""

    key: bytes
    value: bytes
    expire_ts: int = 0
    ts: int = 0
    deleted: bool = False


def _rows_in(data: bytes) -> list[Row]:
    """Up to seven records, laid out one after the other in drawn bytes: far cheaper to draw than lists of tuples."""
    source = BytesIO(data)
    rows = []
    for _ in range(source.read(1)[0] % 8):
        shape, key_size, value_size, choice = source.read(4).ljust(4, b"\0")
        key, value, number = source.read(key_size % 24), source.read(value_size % 16), source.read(8)
        numbers = (0, 1, MAX_U64, int.from_bytes(number, "big"))
        row = Row(key, value, numbers[choice & 3], numbers[choice >> 2 & 3], bool(shape & 1))
        rows.append(row._replace(key=_spiced(key)) if shape & 2 else row)
    return rows


records = st.binary(min_size=90, max_size=140).map(_rows_in)
pairs = records.map(lambda rows: [(row.key, row.value) for row in rows])
