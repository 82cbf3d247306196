"""Keys in flags and in what people are shown."""

from __future__ import annotations

from formats.errors import InvalidKeyText
from formats.keytext import format_key, parse_key
from tikv_br.cli.options import KeyForm
from tikv_br.errors import UsageError


def read_key(text: str, form: KeyForm, flag: str) -> bytes:
    """Return the key that ``text`` says. Raises `UsageError` naming the flag."""
    try:
        return parse_key(text, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"{flag}: {error}", hint=f"Keys are read as --format {form.value}.") from None


def read_range(start: str, end: str, form: KeyForm) -> tuple[bytes, bytes]:
    """Return the range [start, end), an empty end meaning none. Raises `UsageError` when nothing lies between."""
    first, last = read_key(start, form, "--start"), read_key(end, form, "--end")
    if last and first >= last:
        raise UsageError("--start is not below --end", hint="The range is [start, end); leave --end out for no bound.")
    return first, last


def show(data: bytes, form: KeyForm) -> str:
    """Return bytes as a person can read them in one line: hex where asked for, escaped otherwise."""
    return format_key(data, KeyForm.HEX if form is KeyForm.HEX else KeyForm.ESCAPED)
