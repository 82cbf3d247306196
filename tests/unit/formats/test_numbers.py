"""Numbers as people and other programs write them, and what reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.cluster.config import split_address
from tikv_br.cluster.timestamps import parse_ts
from tikv_br.errors import UsageError
from tikv_br.formats.numbers import parse_decimal
from tikv_br.incremental.kafka.url import parse
from tikv_br.web.address import Address

NONE = ["9" * 5000, "²", "٣", "1²", "+1", "-1", "1_0", "0x1", "1e1", "1.0", "nan", "\udcff"]


@given(st.integers(0, 1 << 70), st.integers(0, 1 << 70), st.integers(0, 5000))
def test_numbers_up_to_a_limit(number: int, most: int, zeros: int) -> None:
    """With any number of zeros in front."""
    assert parse_decimal("0" * zeros + str(number), most) == (number if number <= most else None)


@given(st.text())
def test_other_texts(text: str) -> None:
    """Only ASCII digits are a number."""
    assert (parse_decimal(text, 10**300) is None) is not (text.isascii() and text.isdigit())


@pytest.mark.parametrize("text", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize(
    "read",
    [
        lambda text: parse_ts(text, "--until"),
        lambda text: Address.parse(f"host:{text}"),
        lambda text: split_address(f"host:{text}"),
        lambda text: parse(f"kafka://host:9092/topic?partition-num={text}"),
        lambda text: parse(f"kafka://host:{text}/topic"),
    ],
    ids=["time", "status address", "address", "setting of a topic", "address of a topic"],
)
def test_other_texts_are_refused(read: Callable[[str], object], text: str) -> None:
    """Of flags, and of addresses that servers advertise: no other error, and no other number."""
    with pytest.raises(UsageError):
        read(text)
