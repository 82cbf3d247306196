"""Footers: a round trip, and what is refused. Those of RocksDB and TiKV are read in test_reader and the golden tests."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.errors import DamagedBytes, FormatError, UnsupportedFormat
from tikv_br.formats.sst.block import FOOTER_SIZE, MAGIC, ChecksumType, Footer, read_footer
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.source import MemorySource

FOOTER = Footer(2, ChecksumType.CRC32C, BlockHandle(500, 200), BlockHandle(100, 300))


def file_with(footer: bytes, size: int = 1000) -> MemorySource:
    """A file of so many bytes before its footer."""
    return MemorySource(bytes(size) + footer)


@pytest.mark.parametrize("version", range(2, 6))
@pytest.mark.parametrize("checksum", list(ChecksumType))
def test_round_trip(version: int, checksum: ChecksumType) -> None:
    """A footer of any version and checksum that can be written is read as it was."""
    footer = Footer(version, checksum, BlockHandle(500, 200), BlockHandle(100, 300))
    encoded = footer.encode()
    assert len(encoded) == FOOTER_SIZE
    assert read_footer(file_with(encoded)) == footer


def test_version_6_is_not_written() -> None:
    """Format version 6 is read only."""
    with pytest.raises(UnsupportedFormat):
        Footer(6, ChecksumType.CRC32C, BlockHandle(0, 0), None).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (bytes(52), "52 bytes are too few"),
        (bytes(1000), "magic number 0x0"),
        (FOOTER.encode()[:-1] + b"\0", "magic number"),
        (bytes(100) + FOOTER.encode(), "names a block at 500"),
        (bytes(1000) + b"\x01" + b"\xff" * 40 + FOOTER.encode()[41:], "varint"),
    ],
)
def test_damaged(data: bytes, message: str) -> None:
    """Files that are too short, of another kind, or whose footer points outside, are damaged."""
    with pytest.raises(DamagedBytes, match=message):
        read_footer(MemorySource(data))


def test_unsupported() -> None:
    """The legacy magic number, versions outside of 2 to 6 and unknown checksums are named."""
    encoded = FOOTER.encode()
    with pytest.raises(UnsupportedFormat, match="version 0"):
        read_footer(file_with(encoded[:-8] + struct.pack("<Q", 0xDB4775248B80FB57)))
    for version in (0, 1, 7, 2**32 - 1):
        with pytest.raises(UnsupportedFormat, match=f"version {version}"):
            read_footer(file_with(encoded[:-12] + struct.pack("<IQ", version, MAGIC)))
    with pytest.raises(UnsupportedFormat, match="type 9"):
        read_footer(file_with(b"\x09" + encoded[1:]))


@given(st.binary(min_size=41, max_size=41), st.integers(2, 6))
def test_any_bytes(start: bytes, version: int) -> None:
    """For any bytes of a footer, handles lie within the file or an error has the reason."""
    source = file_with(start + struct.pack("<IQ", version, MAGIC))
    try:
        footer = read_footer(source)
    except FormatError:
        return
    for handle in filter(None, (footer.metaindex, footer.index)):
        assert 0 <= handle.offset <= handle.offset + handle.size <= source.size
