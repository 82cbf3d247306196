"""What the property tests of the codecs draw, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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


def keys(max_size: int = 40) -> st.SearchStrategy[bytes]:
    """Byte strings, half of them of the few bytes that mean something to an encoding."""
    plain = st.binary(max_size=max_size)
    return plain | plain.map(lambda data: bytes(_EDGES[byte % len(_EDGES)] for byte in data))


u64 = st.integers(0, MAX_U64)
timestamps = st.integers(1, MAX_U64)
expiries = st.sampled_from([0, 0, 1, 2, 2**32, MAX_U64]) | u64
keyspaces = st.sampled_from([0, 1, 4242, 0xFFFFFE, 0xFFFFFF]) | st.integers(0, 0xFFFFFF)
