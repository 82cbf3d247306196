"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest
import typer

from tikv_br.cli.options import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1m", 60), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800), ("15", 15), ("1.5m", 90), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    """Every unit, compounds, fractions and plain seconds."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "1x", "1m30", "-5s", "1 m", "m1", "1h 30m", "nan"])
def test_no_durations(text: str) -> None:
    """Anything else is refused with examples."""
    with pytest.raises(typer.BadParameter, match="90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("64k", 65536),
        ("1.5MiB", 1_572_864),
        ("2GB", 2**31),
        ("1 t", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Every unit, in any case, with or without i and B."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "1x", "-1", "1MiBs", "0x10"])
def test_no_sizes(text: str) -> None:
    """Anything else is refused with examples."""
    with pytest.raises(typer.BadParameter, match="16MiB"):
        parse_size(text)
