"""A key about half-way between two."""

from __future__ import annotations

WINDOW = 8
"""Bytes behind the common prefix that are looked at: enough to halve 64 times."""


def between(low: bytes, high: bytes) -> bytes | None:
    """A short key in (low, high], about half-way as bytes count; None when ``low`` is not below ``high``.

    Keys are read as fractions, so only their first bytes that differ matter.
    """
    if low >= high:
        return None
    prefix = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    first, last = (int.from_bytes(key[prefix : prefix + WINDOW].ljust(WINDOW, b"\0"), "big") for key in (low, high))
    middle = low[:prefix] + ((first + last + 1) // 2).to_bytes(WINDOW, "big").rstrip(b"\0")
    return middle if low < middle <= high else high
