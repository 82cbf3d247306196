"""Versions of TiKV that a playground emulates."""

from __future__ import annotations

import pytest

from tikv_br.errors import UsageError
from tikv_br.playground.settings import ServerVersion


@pytest.mark.parametrize(
    ("text", "tikv", "pd"),
    [
        ("", "9.0.0-beta.2", "8.5.2"),
        ("5.4", "5.4.3", "5.4.3"),
        ("6.5", "6.5.12", "6.5.12"),
        ("6.5.3", "6.5.3", "6.5.3"),
        ("7.2", "7.2.0", "7.2.0"),
        ("9.0", "9.0.0-beta.2", "9.0.0-beta.2"),
    ],
)
def test_versions_by_their_names(text: str, tikv: str, pd: str) -> None:
    """A release line stands for its newest patch, and nothing for the recorded servers."""
    assert ServerVersion.parse(text) == ServerVersion(tikv, pd)


@pytest.mark.parametrize("text", ["5.3", "6", "v6.5", "six", "6.5.3.1"])
def test_other_texts_are_refused(text: str) -> None:
    """A text that is no version, or one before 5.4, is an error of usage."""
    with pytest.raises(UsageError, match="--version"):
        ServerVersion.parse(text)


@pytest.mark.parametrize(
    ("line", "broken", "fixed"),
    [("6.5", "6.5.3", "6.5.4"), ("6.6", "6.6.0", "7.3.0"), ("7.1", "7.1.1", "7.1.2"), ("7.2", "7.2.0", "7.3.0")],
)
def test_the_patches_that_collect_expiry(line: str, broken: str, fixed: str) -> None:
    """From 6.4 on files have properties of rows; the fix of their expiry came in patches of some lines."""
    assert ServerVersion.parse(broken).collects_rows, line
    assert not ServerVersion.parse(broken).collects_expiry
    assert ServerVersion.parse(fixed).collects_expiry
    assert not ServerVersion.parse("6.3").collects_rows
