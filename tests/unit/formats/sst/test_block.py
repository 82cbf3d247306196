"""Blocks in plain Python, which are the twin that the kernel is compared with."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.block import BlockReader, ChecksumType, Footer, encode_entries, entries, entries_end
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.source import MemorySource


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), max_size=20))
def test_round_trip(pairs: list[tuple[bytes, bytes]]) -> None:
    """A block of any pairs gives them back."""
    assert list(entries(encode_entries(pairs))) == pairs


def test_shared_keys() -> None:
    """Keys are put together from the one before; a hash index behind the entries is skipped."""
    rows = b"\x00\x03\x01abc1" + b"\x02\x02\x00xy" + b"\x04\x00\x02" + b"22"
    plain = rows + struct.pack("<II", 0, 1)
    hashed = rows + struct.pack("<I", 0) + b"\xff\x00\xfe" + struct.pack("<HI", 3, 1 | 1 << 31)
    for block in (plain, hashed):
        assert entries_end(block) == len(rows)
        assert list(entries(block)) == [(b"abc", b"1"), (b"abxy", b""), (b"abxy", b"22")]


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"abc",
        struct.pack("<I", 1),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<HI", 9, 1 << 31),
        b"\x01\x01\x01ab" + struct.pack("<II", 0, 1),  # shares with nothing
        b"\x00\x01\x02ab" + struct.pack("<II", 0, 1),  # value reaches into the restarts
        b"\x00\xff\xff\xff\xff\x0f\x00a" + struct.pack("<II", 0, 1),
        b"\x00\x01" + struct.pack("<II", 0, 1),
        b"\x80" * 6 + struct.pack("<II", 0, 1),
    ],
)
def test_damaged(block: bytes) -> None:
    """Entries and restarts that do not fit their block are damage."""
    with pytest.raises(DamagedBytes):
        list(entries(block))


def reader(stored: bytes, checksum: ChecksumType, base: int = 0) -> BlockReader:
    """A reader of a file that is just these bytes."""
    nowhere = BlockHandle(0, 0)
    return BlockReader(MemorySource(stored), Footer(6, checksum, nowhere, nowhere, base))


@pytest.mark.parametrize("checksum", list(ChecksumType))
def test_checksum_is_verified(checksum: ChecksumType) -> None:
    """A flipped bit anywhere in a block, its method or its checksum is found before the block is used."""
    handle = BlockHandle(0, 7)
    stored = b"content" + b"\0" + checksum.compute([b"content"], 0).to_bytes(4, "little")
    assert bytes(reader(stored, checksum).read(handle)) == b"content"
    if checksum is ChecksumType.NONE:
        return
    for bit in range(len(stored) * 8):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedBytes, match="checksum"):
            reader(bytes(changed), checksum).read(handle)


@pytest.mark.parametrize("handle", [BlockHandle(0, 8), BlockHandle(9, 0), BlockHandle(2**63, 0), BlockHandle(0, 2**63)])
def test_outside_of_the_file(handle: BlockHandle) -> None:
    """A handle that reaches beyond the file is damage, whatever its size."""
    with pytest.raises(DamagedBytes, match="outside the file of 12 bytes"):
        reader(bytes(12), ChecksumType.NONE).read(handle)


def test_sources_that_return_less() -> None:
    """A source that breaks its promise is noticed."""

    class Short(MemorySource, frozen=True):
        def read_at(self, offset: int, length: int) -> memoryview:
            return super().read_at(offset, length - 1)

    nowhere = BlockHandle(0, 0)
    blocks = BlockReader(Short(bytes(100)), Footer(2, ChecksumType.NONE, nowhere, nowhere))
    with pytest.raises(DamagedBytes, match="9 read"):
        blocks.read(BlockHandle(0, 5))
