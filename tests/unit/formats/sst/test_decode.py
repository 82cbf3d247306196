"""The kernel against its plain twin: the same rows or both refuse, and never a byte beyond its buffers."""

from __future__ import annotations

import random
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.block import entries
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.formats.sst.reader import (
    CURSOR_SIZE,
    DAMAGED,
    DONE,
    NEED_KEY,
    NEED_VALUE,
    NO_PUT,
    POSITION,
    ROWS,
    SLACK,
    TRAILER,
    decode_rows,
)

InternalRow = tuple[bytes, bytes]
Bytes = npt.NDArray[np.uint8]

FENCE = 64
"""Bytes after each buffer that must not change."""


def by_twin(block: bytes) -> list[InternalRow] | None:
    """Internal keys and values by the plain reader; None when damaged."""
    try:
        rows = list(entries(block))
    except DamagedBytes:
        return None
    return rows if all(len(key) >= 8 for key, _ in rows) else None


class Fenced:
    """A buffer inside a larger one whose rest is watched."""

    def __init__(self, size: int) -> None:
        self._all = np.full(size + FENCE, 0xA5, np.uint8)
        self.room: Bytes = self._all[:size]

    def is_intact(self) -> bool:
        """Whether nothing was written behind the buffer."""
        return bool((self._all[-FENCE:] == 0xA5).all())


def by_kernel(block: bytes, rows_at_once: int = 1000, bytes_at_once: int = 1 << 12) -> list[InternalRow] | None:
    """The same by the kernel, in steps of a few rows; None when damaged."""
    data = np.frombuffer(block, np.uint8)
    cursor = np.zeros(CURSOR_SIZE, np.int64)
    cursor[POSITION] = -1
    last_key = Fenced(max(1, len(block)))
    decoded: list[InternalRow] = []
    key_room = value_room = bytes_at_once
    while True:
        key_offsets, value_offsets = np.zeros((2, rows_at_once + 1), np.int64)
        keys, values = Fenced(key_room + SLACK), Fenced(value_room)
        trailers = np.zeros(rows_at_once, np.int64)
        cursor[ROWS] = 0
        result = decode_rows(data, cursor, last_key.room, key_offsets, keys.room, value_offsets, values.room, trailers)
        assert keys.is_intact()
        assert values.is_intact()
        assert last_key.is_intact()
        count = int(cursor[ROWS])
        for row in range(count):
            key = keys.room[key_offsets[row] : key_offsets[row + 1]].tobytes() + struct.pack("<q", trailers[row])
            decoded.append((key, values.room[value_offsets[row] : value_offsets[row + 1]].tobytes()))
        if result == DAMAGED:
            return None
        if result == DONE:
            return decoded
        assert count or cursor[NEED_KEY] > key_room + SLACK or cursor[NEED_VALUE] > value_room
        key_room = max(bytes_at_once, int(cursor[NEED_KEY]))
        value_room = max(bytes_at_once, int(cursor[NEED_VALUE]))


def encoded(rows: list[InternalRow], interval: int) -> bytes:
    """A block with as much shared as can be, trailers included, and a restart every so many rows."""
    block, restarts, last = bytearray(), [], b""
    for number, (key, value) in enumerate(rows):
        shared = 0
        if number % interval:
            while shared < min(len(last), len(key)) and last[shared] == key[shared]:
                shared += 1
        else:
            restarts.append(len(block))
        block += encode_varint(shared) + encode_varint(len(key) - shared) + encode_varint(len(value))
        block += key[shared:] + value
        last = key
    return bytes(block) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


trailer = st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)) | st.just(b"\x01" + bytes(7))
user_key = st.binary(max_size=20) | st.lists(st.sampled_from([b"\x01", bytes(7), b"a"]), max_size=9).map(b"".join)
internal_rows = st.lists(
    st.tuples(st.builds(lambda key, end: key + end, user_key, trailer), st.binary(max_size=200)), max_size=30
)


@given(internal_rows, st.integers(1, 20), st.integers(1, 40), st.integers(1, 300))
def test_decodes(rows: list[InternalRow], interval: int, rows_at_once: int, bytes_at_once: int) -> None:
    """Any rows, at any restart interval, into columns of any size, come out as they were."""
    block = encoded(rows, interval)
    assert by_twin(block) == rows
    assert by_kernel(block, rows_at_once, bytes_at_once) == rows


@given(st.binary(max_size=300))
def test_any_bytes(block: bytes) -> None:
    """On arbitrary bytes kernel and twin agree about what is damaged and about the rows of what is not."""
    assert by_kernel(block) == by_twin(block)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.binary(max_size=60)), max_size=8)
)
def test_plausible_lengths(parts: list[tuple[int, int, int, bytes]]) -> None:
    """Lengths that are nearly right, which a flipped bit makes, end alike in both."""
    rows = b"".join(bytes(lengths) + data for *lengths, data in parts)
    block = rows + struct.pack("<II", 0, 1)
    assert by_kernel(block, 3, 50) == by_twin(block)


def mutated(random_: random.Random, block: bytes) -> bytes:
    """The block with a few bytes flipped, replaced by telling ones, cut out or put in."""
    data = bytearray(block)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        match random_.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << random_.randrange(8)
            case 1 if at < len(data):
                data[at] = random_.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del data[at : at + random_.randint(1, 8)]
            case 3:
                data[at:at] = random_.choice(
                    (b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x80\x01", random_.randbytes(3))
                )
            case _:
                data[-4:] = struct.pack("<I", random_.choice((0, 1, 2, 1 << 30, 1 << 31, 2**32 - 1, len(data) // 4)))
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_mutations(seed: int) -> None:
    """For thousands of damaged blocks the kernel agrees with its twin and stays within its buffers."""
    random_ = random.Random(seed)
    rows = [
        (b"zkey%04d" % number + b"\x01" + bytes(7), random_.randbytes(random_.choice((0, 3, 200))))
        for number in range(40)
    ]
    block = encoded(rows, 16)
    for _ in range(1500):
        damaged = mutated(random_, block)
        assert by_kernel(damaged, random_.randint(1, 50), random_.randint(1, 2000)) == by_twin(damaged)


def test_rows_that_are_no_puts() -> None:
    """Without room for trailers decoding stops at the first row that is no put, and leaves those before."""
    rows = [(b"za" + b"\x01" + bytes(7), b"1"), (b"zb" + b"\x07" + bytes(7), b"2")]
    cursor = np.zeros(CURSOR_SIZE, np.int64)
    cursor[POSITION] = -1
    room, offsets = np.zeros(1000, np.uint8), np.zeros((2, 10), np.int64)
    block = np.frombuffer(encoded(rows, 1), np.uint8)
    result = decode_rows(
        block, cursor, room.copy(), offsets[0], room.copy(), offsets[1], room.copy(), np.zeros(0, np.int64)
    )
    assert (result, cursor[ROWS], cursor[TRAILER]) == (NO_PUT, 1, 7)


def test_keys_that_expand() -> None:
    """A small block whose keys expand to much more is decoded in bounded pieces."""
    key = b"k" * 2000
    rows = [(key + b"%06d" % number + b"\x01" + bytes(7), b"") for number in range(1500)]
    block = encoded(rows, 10_000)
    assert len(block) < 40_000
    assert by_kernel(block, 1000, 1 << 16) == rows
