"""Numbers that others have written as text."""

from __future__ import annotations


def parse_decimal(text: str, most: int) -> int | None:
    """The number of ASCII digits, if it is at most ``most``; None for any other text, however long.

    `int` also takes digits of other scripts, signs and underscores, and raises for more than some thousand digits; `str.isdigit` is
    true of superscripts, for which `int` raises.
    """
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None
