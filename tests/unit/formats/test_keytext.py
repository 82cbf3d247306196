from __future__ import annotations

import ast
import binascii

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.examples import keys, many
from tikv_br.formats.errors import InvalidKeyText
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import FORMS, format_key, parse_key, show_key


@pytest.mark.parametrize(
    ("text", "form", "key"),
    [
        ("", "hex", b""),
        ("00fF7a", "hex", b"\x00\xffz"),
        ("ab", "raw", b"ab"),
        ("\\x61", "raw", b"\\x61"),
        ("ü", "raw", b"\xc3\xbc"),
        ("\udcff", "raw", b"\xff"),
        ("a\\x00\\xFF", "escaped", b"a\x00\xff"),
        ("\\141\\000\\377", "escaped", b"a\x00\xff"),
        (r"\a\b\f\n\r\t\v\\\'\"", "escaped", b"\a\b\f\n\r\t\v\\'\""),
        ("ü'\"", "escaped", b"\xc3\xbc'\""),
        ("1000", "text", b"1000"),
        (r"a\x00", "text", b"a\x00"),
        ("hex:00fF", "text", b"\x00\xff"),
        ("hex:", "text", b""),
        (r"\x68ex:00", "text", b"hex:00"),
    ],
)
def test_known_texts(text: str, form: str, key: bytes) -> None:
    """Texts in the forms that TiKV-BR takes give the keys that it makes of them."""
    assert parse_key(text, form) == key


@pytest.mark.parametrize(
    ("text", "form", "message"),
    [
        ("abc", "hex", "3 hex digits"),
        ("0x61", "hex", "'x' at character 2"),
        ("61 62", "hex", "' ' at character 3"),
        ("\u0661\u0661", "hex", "character 1"),
        ("\\", "escaped", "at byte 1"),
        ("ab\\q", "escaped", "at byte 3"),
        ("\\x6", "escaped", "not a known escape"),
        ("\\xg0", "escaped", "not a known escape"),
        ("\\400", "escaped", "not a known escape"),
        ("\\08", "escaped", "not a known escape"),
        ("a\ud800", "raw", "character 2 cannot be encoded as UTF-8"),
        ("a\ud800", "escaped", "character 2 cannot be encoded as UTF-8"),
        ("hex:0", "text", "1 hex digits"),
        ("a\\q", "text", "at byte 2"),
        ("61", "base64", "unknown key format 'base64'"),
    ],
)
def test_texts_that_are_no_keys(text: str, form: str, message: str) -> None:
    """A text that does not parse is refused with the place that is wrong."""
    with pytest.raises(InvalidKeyText, match=message):
        parse_key(text, form)


def test_a_key_has_no_text_in_an_unknown_form() -> None:
    """Formatting refuses unknown forms, as parsing does."""
    with pytest.raises(InvalidKeyText, match="text, hex, raw or escaped"):
        format_key(b"", "base64")


@many(2)
@given(keys())
def test_round_trip(key: bytes) -> None:
    """Every key survives every form; hex is what binascii writes, escapes are what Python's own parser reads."""
    for form in (*FORMS, "text"):
        assert parse_key(format_key(key, form), form) == key
    assert parse_key(binascii.hexlify(key).decode().upper(), "hex") == key
    assert ast.literal_eval(f'b"{format_key(key, "escaped")}"') == key
    assert format_key(key, "escaped").isprintable()


@many(1)
@given(st.text("01abfx\\'\"nü\u0661\udc80\ud800 \0\n", max_size=12), st.sampled_from(FORMS))
def test_any_text_is_a_key_or_refused(text: str, form: str) -> None:
    """No text does anything else than parse to a key that has a text again, or raise `InvalidKeyText`."""
    try:
        key = parse_key(text, form)
    except InvalidKeyText:
        return
    assert parse_key(format_key(key, form), form) == key


@many(1)
@given(st.text("0123456789abcdefABCDEFg x", max_size=9))
def test_hex_agrees_with_binascii(text: str) -> None:
    """Hex texts are taken and refused as binascii takes and refuses them."""
    try:
        expected = binascii.unhexlify(text)
    except binascii.Error:
        with pytest.raises(InvalidKeyText):
            parse_key(text, "hex")
    else:
        assert parse_key(text, "hex") == expected


def test_text_of_a_key_that_looks_like_hex_is_not_hex() -> None:
    """The shown text can be passed to a command."""
    assert format_key(b"hex:00", "text") == r"\x68ex:00"


def test_shown_keys_are_cut() -> None:
    """A message shows 64 bytes of a key at most, and how long it is."""
    assert show_key(b"") == ""
    assert show_key(bytes(64)) == "00" * 64
    assert show_key(b"\xff" * 65) == "ff" * 64 + "… (65 bytes)"
    assert show_key(bytes(1 << 20)) == "00" * 64 + "… (1,048,576 bytes)"
    assert show_key(b"k" * 65, "escaped") == "k" * 64 + "… (65 bytes)"
    assert str(KeyRange(b"a" * 1000, b"")) == f"[{'61' * 64}… (1,000 bytes), end)"


def test_long_keys_that_do_not_parse_are_cut() -> None:
    """So is a key that a flag or a file gives in a wrong form."""
    with pytest.raises(InvalidKeyText) as raised:
        parse_key("x" * 1_000_000, "hex")
    assert len(str(raised.value)) < 300
    assert "… (1,000,000 characters)" in str(raised.value)
