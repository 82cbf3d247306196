"""Compression of blocks against other implementations of the same methods, and hostile input."""

from __future__ import annotations

import bz2
import contextlib
import zlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.formats.sst.compression import MAX_BLOCK_SIZE, Compression, Decompressor, compressor

PACKED = [Compression.SNAPPY, Compression.LZ4, Compression.ZSTD]
ZLIB, BZIP2, LZ4, ZSTD = 2, 3, 4, 7
blocks = st.binary(max_size=2000) | st.binary(min_size=1, max_size=20).map(lambda part: part * 200)


def packed(compression: Compression, block: bytes, level: int = 0) -> bytes:
    """The block as stored."""
    compress = compressor(compression, level)
    assert compress is not None
    return b"".join(compress(block))


def deflated(block: bytes) -> bytes:
    """The block as raw deflate, which RocksDB stores."""
    stream = zlib.compressobj(wbits=-14)
    return stream.compress(block) + stream.flush()


@given(st.sampled_from(PACKED), blocks)
def test_round_trip(compression: Compression, block: bytes) -> None:
    """A block comes back, from bytes and from a view."""
    stored = packed(compression, block)
    assert bytes(Decompressor()(compression.value, stored)) == block
    assert bytes(Decompressor()(compression.value, memoryview(stored))) == block


@given(blocks)
def test_other_implementation(block: bytes) -> None:
    """The methods of cramjam unpack our blocks: raw snappy, and raw lz4 and zstd behind the size."""
    size = encode_varint(len(block))
    assert bytes(cramjam.snappy.decompress_raw(packed(Compression.SNAPPY, block))) == block
    lz4 = packed(Compression.LZ4, block)
    assert lz4.startswith(size)
    assert bytes(cramjam.lz4.decompress_block(lz4[len(size) :], output_len=len(block))) == block
    zstd = packed(Compression.ZSTD, block)
    assert zstd.startswith(size)
    assert bytes(cramjam.zstd.decompress(zstd[len(size) :])) == block


def test_labels() -> None:
    """Labels parse in any case, and others are refused by name."""
    assert [Compression.from_label(method.label.title()) for method in Compression] == list(Compression)
    with pytest.raises(UnsupportedFormat, match="'gzip'"):
        Compression.from_label("gzip")


def test_methods_of_others() -> None:
    """Zlib and bzip2, which RocksDB can write, unpack too; others are refused by number."""
    block = b"block" * 100
    assert Decompressor()(ZLIB, encode_varint(500) + deflated(block)) == block
    assert Decompressor()(BZIP2, encode_varint(500) + bz2.compress(block)) == block
    with pytest.raises(UnsupportedFormat, match="method 6"):
        Decompressor()(6, b"\x01\x00")


@pytest.mark.parametrize("method", [1, ZLIB, BZIP2, LZ4, 5, ZSTD])
@given(data=st.binary(max_size=100))
def test_any_bytes(method: int, data: bytes) -> None:
    """Any bytes unpack to what they say or are damaged; nothing else happens."""
    with contextlib.suppress(DamagedBytes):
        Decompressor()(method, data)


@pytest.mark.parametrize("method", [1, ZLIB, BZIP2, LZ4, ZSTD])
def test_sizes_that_lie(method: int) -> None:
    """A size that is too large to be true, or other than what comes out, is damage and allocates nothing of that size."""
    block = bytes(1000)
    stored = {
        1: packed(Compression.SNAPPY, block)[2:],
        ZLIB: deflated(block),
        BZIP2: bz2.compress(block),
        LZ4: packed(Compression.LZ4, block)[2:],
        ZSTD: packed(Compression.ZSTD, block)[2:],
    }[method]
    for size in (0, 999, 1001, MAX_BLOCK_SIZE + 1, 2**32 - 1):
        with pytest.raises(DamagedBytes):
            Decompressor()(method, encode_varint(size) + stored)


def test_zstd_frame_that_lies() -> None:
    """A frame header that claims terabytes is refused before the library believes it."""
    frame = b"\x28\xb5\x2f\xfd" + b"\xe0" + (1 << 42).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(DamagedBytes, match="4398046511104"):
        Decompressor()(ZSTD, encode_varint(1000) + frame)


def test_frames_of_unknown_size() -> None:
    """A zstd frame without a size, as streams make it, unpacks to the size of the block."""
    stream = cramjam.zstd.Compressor()
    stream.compress(b"block" * 100)
    assert Decompressor()(ZSTD, encode_varint(500) + bytes(stream.finish())) == b"block" * 100
