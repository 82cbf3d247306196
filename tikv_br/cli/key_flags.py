"""Flags of keys and ranges of keys, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

from tikv_br.cli.command import Flags, flag
from tikv_br.cli.output import KeyForm, read_key, read_range
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import successor
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import HEX_MARK, is_hex
from tikv_br.progress_events import Notice, Reporter

_KEY_FORMAT = partial(
    flag,
    None,
    "How keys are written: text (with \\xNN escapes; what follows hex: is hex), hex, raw (as typed) or escaped (only escapes).",
    show_default="text",
)
KEY_FORMAT = partial(_KEY_FORMAT, "--key-format", "--format")
KEY_FORMAT_ALONE = partial(_KEY_FORMAT, "--key-format")
"""Help for ``--format`` in commands where it has more values."""
START = partial(flag, "", "Start of the range (inclusive; empty: no bound).", metavar="KEY")
END = partial(flag, "", "End of the range (exclusive; empty: no bound).", metavar="KEY")


class KeyFormatFlags(Flags):
    key_format: KeyForm | None = KEY_FORMAT()

    @property
    def form(self) -> KeyForm:
        """The form of keys."""
        return self.key_format or KeyForm.TEXT


class KeyAndValueFormatFlags(KeyFormatFlags):
    value_format: KeyForm | None = flag(
        None, "Format of the value.", show_default="as --key-format; raw if that is text"
    )

    @property
    def value_form(self) -> KeyForm:
        """The form of values: as they are, unless one was asked for."""
        return self.value_format or (KeyForm.RAW if self.form is KeyForm.TEXT else self.form)


class RangeFlags(KeyFormatFlags):
    start: str = START()
    end: str = END()
    key_format: KeyForm | None = KEY_FORMAT()

    def key_range(self) -> KeyRange:
        """The range of user keys. Raises `UsageError`."""
        return read_range(*self.bounds(), self.form)

    def notice(self, reporter: Reporter) -> None:
        """Report keys that are hex as well, in commands that read keys as hex before."""
        notice_ambiguous(reporter, self.key_format, zip(("--start", "--end"), self.bounds(), strict=True))

    def bounds(self) -> tuple[str, str]:
        """Start and end as they are written. Raises `UsageError`."""
        return self.start, self.end


class OneRangeFlags(RangeFlags):
    """One range of keys, as ``--range`` or as ``--start`` and ``--end``."""

    span: str = flag(
        "",
        "Key range: START (inclusive) to END (exclusive); either may be empty; a colon of a key is \\x3a.",
        "--range",
        metavar="START:END",
    )

    def bounds(self) -> tuple[str, str]:
        """As `RangeFlags.bounds`."""
        if not self.span:
            return self.start, self.end
        if self.start or self.end:
            raise UsageError("--range cannot be combined with --start and --end", hint="Pass one of them.")
        return split_range(self.span, self.form)


class RangeOrPrefixFlags(OneRangeFlags):
    """One range of keys, also as ``--prefix``."""

    prefix: str = flag("", "Only keys with this prefix, instead of a range.", metavar="KEY")

    def key_range(self) -> KeyRange:
        """As `RangeFlags.key_range`."""
        if not self.prefix:
            return super().key_range()
        if any(self.bounds()):
            raise UsageError("--prefix cannot be combined with a range", hint="Pass one of them.")
        key = read_key(self.prefix, self.form, "--prefix")
        return KeyRange(key, successor(key))

    def notice(self, reporter: Reporter) -> None:
        """As `RangeFlags.notice`."""
        super().notice(reporter)
        notice_ambiguous(reporter, self.key_format, [("--prefix", self.prefix)])


def notice_ambiguous(reporter: Reporter, form: KeyForm | None, texts: Iterable[tuple[str, str]]) -> None:
    """Report keys that are read as text although they are hex as well, by flag, unless a form was asked for."""
    for name, text in texts:
        if form is None and is_hex(text):
            reporter(Notice(f"{name} {text}: read as the text {text}; if it is hex, pass {HEX_MARK}{text}"))


class RangesFlags(KeyFormatFlags):
    """Ranges of keys, as ``--start`` and ``--end`` or as ``--range``, and as ``--prefix``."""

    start: str = START()
    end: str = END()
    key_format: KeyForm | None = KEY_FORMAT_ALONE()
    ranges: list[str] | None = flag(
        None,
        "Key range: START (inclusive) to END (exclusive); either may be empty; a colon of a key is \\x3a (may be repeated).",
        "--range",
        metavar="START:END",
    )
    prefixes: list[str] | None = flag(
        None, "Prefix of keys, a range of its own (may be repeated).", "--prefix", metavar="KEY"
    )

    def key_ranges(self) -> tuple[KeyRange, ...]:
        """The ranges of user keys; none = no bound was given. Raises `UsageError`."""
        if (self.start or self.end) and self.ranges:
            raise UsageError("--start and --end cannot be combined with --range", hint="Pass all ranges with --range.")
        texts = [("--start", "--end", (self.start, self.end))] if self.start or self.end else []
        texts += [("--range", "--range", pair) for pair in self._texts()]
        ranges = [
            KeyRange(read_key(first, self.form, of_first), read_key(last, self.form, of_last))
            for of_first, of_last, (first, last) in texts
        ]
        keys = [read_key(each, self.form, "--prefix") for each in self.prefixes or ()]
        return (*ranges, *(KeyRange(key, successor(key)) for key in keys))

    def notice(self, reporter: Reporter) -> None:
        """As `RangeFlags.notice`."""
        texts = [("--start", self.start), ("--end", self.end)]
        texts += [("--range", key) for pair in self._texts() for key in pair]
        texts += [("--prefix", each) for each in self.prefixes or ()]
        notice_ambiguous(reporter, self.key_format, texts)

    def _texts(self) -> Iterator[tuple[str, str]]:
        return (split_range(text, self.form) for text in self.ranges or ())


_RANGE = re.compile(r"(hex:[^:]*|[^:]*):(hex:[^:]*|[^:]*)")


def split_range(text: str, form: KeyForm) -> tuple[str, str]:
    """START and END of ``START:END``; the colon of ``hex:`` belongs to the key. Raises `UsageError`."""
    if form is KeyForm.TEXT:
        found = _RANGE.fullmatch(text)
        first, last = found.groups() if found is not None else ("hex", "")
        colon = first != "hex"  # of hex:6b, which has no end
    else:
        first, colon, last = text.partition(":")
    if not colon or ":" in last.removeprefix(HEX_MARK):
        raise UsageError(
            f"--range {text!r} is not START:END", hint=r"Write a colon of a key as \x3a, and a key in hex as hex:…"
        )
    return first, last
