"""Figures as people read them."""

from __future__ import annotations

import pytest

from tikv_br.cli.output import human_bytes, human_seconds, plain_table


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes(count: int, text: str) -> None:
    """Bytes grow through the units and stay in the last."""
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12s"), (12.34, "12.3s"), (245, "4m05s"), (7380, "2h03m"), (59.99, "60.0s")]
)
def test_seconds(seconds: float, text: str) -> None:
    """Seconds become minutes and hours."""
    assert human_seconds(seconds) == text


def test_table_is_aligned_without_trailing_blanks() -> None:
    """Columns start at the same place in every line."""
    assert plain_table(("a", "bb"), [("ccc", "d"), ("e", "")]) == "a    bb\nccc  d\ne"
