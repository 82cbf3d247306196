"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(count: float) -> str:
    """Bytes in powers of 1024 with one decimal: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """Seconds as ``0.42s``, ``12.3s``, ``4m05s`` or ``2h03m``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces, for files, pipes and cron mails."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join(line.rstrip() for line in lines)
