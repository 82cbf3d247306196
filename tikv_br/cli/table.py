"""Tables that fit the width of a terminal: no cell is cut. Prose wraps at words, other columns are left out with a note or stacked."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TextIO

from tikv_br.redaction import visible

LIST_WIDTH = 60
"""A terminal narrower than this gets a list of lines instead of a table without some columns."""
MIN_PROSE = 16
DEFAULT_WIDTH = 80
GAP = 2


def width_of(stream: TextIO) -> int | None:
    """Columns of a terminal or of ``COLUMNS``; None = no limit, as in a pipe or a file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:  # a stream without a descriptor, as in tests
        return DEFAULT_WIDTH


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    prose: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> str:
    """Rows below their headings, in at most `width` columns where words and ids allow it.

    Cells of the columns `prose` wrap at words. If that is not enough, those of `drop` are left out, first to last; if that is not
    enough either, or the terminal is narrow, each row becomes a list of lines.
    """
    names, dropped = list(columns), list[str]()
    rows = [[visible(cell) for cell in row] for row in rows]
    for candidate in ("", *drop):
        if candidate:
            names.remove(candidate)
            dropped.append(candidate)
        shown = [[row[columns.index(name)] for name in names] for row in rows]
        widths = _widths(names, shown, width, prose)
        if widths is not None:
            lines = [line for row in (names, *shown) for line in _lines(row, widths)]
            if dropped:
                lines += wrap(f"(not shown: {', '.join(dropped)}; they need a wider terminal or --output json)", width)
            return "\n".join(lines)
        if width is not None and width < LIST_WIDTH:
            break
    return "\n\n".join(pairs([pair for pair in zip(columns, row, strict=True) if pair[1]], width) for row in rows)


def pairs(rows: Sequence[tuple[str, str]], width: int | None = None, *, indent: int = 0, least: int = 0) -> str:
    """Names and values in two columns, the first at least `least` wide; long values wrap at words, below their beginning."""
    rows = [(visible(name), visible(value)) for name, value in rows]
    first = max([least, *(len(name) for name, _ in rows)])
    begin = indent + first + GAP
    if width is not None and begin > width // 2:  # no room beside the names
        begin = indent + GAP
    lines = []
    for name, value in rows:
        head, (start, *rest) = f"{'':{indent}}{name}", wrap(value, None if width is None else width - begin)
        if len(head) < begin:
            lines.append(f"{head:<{begin}}{start}")
        else:
            lines += [head, f"{'':{begin}}{start}"]
        lines += [f"{'':{begin}}{each}" for each in rest]
    return "\n".join(line.rstrip() for line in lines)


def wrap(text: str, width: int | None) -> list[str]:
    """Lines of at most `width` columns, or longer where a word is."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def _widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, prose: Sequence[str]
) -> list[int] | None:
    """Widths of columns; None if they do not fit."""
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    excess = sum(widths) + GAP * (len(widths) - 1) - width if width is not None else 0
    least = {
        i: max(min(MIN_PROSE, widths[i]), *(len(word) for row in (names, *rows) for word in row[i].split() or [""]))
        for i, name in enumerate(names)
        if name in prose
    }
    while excess > 0:  # the widest column gives way first
        shrinkable = [i for i in least if widths[i] > least[i]]
        if not shrinkable:
            return None
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
        excess -= 1
    return widths


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row as a line, or as several."""
    cells = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        (" " * GAP)
        .join(f"{cell[i] if i < len(cell) else '':<{width}}" for cell, width in zip(cells, widths, strict=True))
        .rstrip()
        for i in range(max(map(len, cells)))
    ]
