r"""Keys as text, in the form of ``--key-format`` or in the three that the Go TiKV-BR's ``--format`` knows.

text
    As escaped; what follows ``hex:`` is hex. A key that begins with ``hex:`` itself is written ``\x68ex:``.

raw
    The text itself, in UTF-8. Bytes that are no UTF-8 travel as lone surrogates, as in ``sys.argv``.
hex
    Two digits a byte, of either case, nothing else.
escaped
    Go's escapes in a string: ``\xNN``, ``\NNN`` (octal), ``\a \b \f \n \r \t \v \\ \' \"``; the rest stands for itself.
"""

from __future__ import annotations

import re

from tikv_br.formats.errors import InvalidKeyText

FORMS = ("raw", "hex", "escaped")
"""The names of the Go tool's forms."""

HEX_MARK = "hex:"
"""Prefix of a hex key in the form ``text``."""

SHOWN_BYTES = 64
"""Maximum number of bytes of a key that a message shows."""

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-3][0-7]{2})|([abfnrtv\\'\"]))|\\(.?)", re.DOTALL)
_LETTERS = dict(zip(b"abfnrtv\\'\"", b"\a\b\f\n\r\t\v\\'\"", strict=True))
_READABLE = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x22: '\\"', 0x5C: "\\\\"} | {
    byte: chr(byte) for byte in range(0x20, 0x7F) if byte not in b'"\\'
}


def parse_key(text: str, form: str) -> bytes:
    """The key that `text` says in `form`. Raises `InvalidKeyText`."""
    if form == "text" and text.startswith(HEX_MARK):
        return _parse_hex(text.removeprefix(HEX_MARK))
    if form == "hex":
        return _parse_hex(text)
    if form not in {"text", *FORMS}:
        raise InvalidKeyText(f"unknown key format {form!r}: text, hex, raw or escaped")
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidKeyText(f"key {_cut(text)}: character {error.start + 1} cannot be encoded as UTF-8") from None
    return data if form == "raw" else _ESCAPE.sub(_unescape, data)


def format_key(key: bytes, form: str) -> str:
    """The text of `key` in `form`, such that `parse_key` gives the key back. Raises `InvalidKeyText` on the form."""
    match form:
        case "raw":
            return key.decode("utf-8", "surrogateescape")
        case "hex":
            return key.hex()
        case "escaped":
            return "".join(_READABLE.get(byte) or f"\\x{byte:02x}" for byte in key)
        case "text":
            escaped = format_key(key, "escaped")
            return f"\\x68{escaped[1:]}" if escaped.startswith(HEX_MARK) else escaped
    raise InvalidKeyText(f"unknown key format {form!r}: text, hex, raw or escaped")


def is_hex(text: str) -> bool:
    """Return whether a text is also a valid hex key."""
    return bool(text) and _HEX.fullmatch(text) is not None


def show_key(key: bytes, form: str = "hex") -> str:
    """A key as messages show it: cut to `SHOWN_BYTES`, because a key may be long or hostile. Not to be parsed."""
    text = format_key(key[:SHOWN_BYTES], form)
    return text if len(key) <= SHOWN_BYTES else f"{text}… ({len(key):,} bytes)"


def show_both(key: bytes) -> str:
    """A key as messages show the bounds of a range: as text and in hex, cut. Empty for an empty key."""
    return f'"{show_key(key, "escaped")}" (hex:{show_key(key)})' if key else ""


def _cut(text: str) -> str:
    """A key that does not parse, as messages quote it."""
    return f"{text!a}" if len(text) <= 2 * SHOWN_BYTES else f"{text[: 2 * SHOWN_BYTES]!a}… ({len(text):,} characters)"


def _parse_hex(text: str) -> bytes:
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    wrong = re.search(r"[^0-9a-fA-F]", text)
    if wrong:
        raise InvalidKeyText(f"key {_cut(text)}: {wrong[0]!a} at character {wrong.start() + 1} is not a hex digit")
    raise InvalidKeyText(f"key {_cut(text)}: {len(text)} hex digits, an odd number")


def _unescape(found: re.Match[bytes]) -> bytes:
    hexadecimal, octal, letter, _ = found.groups()
    if hexadecimal:
        return bytes.fromhex(hexadecimal.decode("ascii"))
    if octal:
        return bytes([int(octal, 8)])
    if letter:
        return bytes([_LETTERS[letter[0]]])
    escape = found.string[found.start() : found.start() + 4].decode("utf-8", "backslashreplace")
    raise InvalidKeyText(f"key: {escape!a} at byte {found.start() + 1} is not a known escape sequence")
