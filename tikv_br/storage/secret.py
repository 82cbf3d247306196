"""Text that must not be shown: it travels and compares, but never prints itself."""

from __future__ import annotations

MASK = "***"


class SecretText:
    """A secret of the user: ``str``, ``repr`` and ``format`` show a mask, JSON refuses it, pickle carries it.

    Only `reveal` gives the text; call it where the text leaves the process, and nowhere else.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, SecretText) else NotImplemented

    def __hash__(self) -> int:
        return hash((SecretText, self._text))

    def __repr__(self) -> str:
        return f"SecretText({MASK if self._text else ''!r})"

    def __str__(self) -> str:
        return MASK if self._text else ""

    def __reduce__(self) -> tuple[type[SecretText], tuple[str]]:
        return (SecretText, (self._text,))
