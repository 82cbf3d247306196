"""Compression of single blocks, with the size prefix that table formats 2 and later have."""

from __future__ import annotations

import bz2
import enum
import functools
import zlib
from collections.abc import Callable
from typing import Any

from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst.coding import Readable, decode_varint, encode_varint

MAX_BLOCK_SIZE = 256 << 20
"""Bytes a block may have when unpacked: far above any row a store takes, and a bound for hostile sizes."""

Compressor = Callable[[Readable], tuple[bytes, bytes]]
Unpacker = Callable[[Readable, int], Readable]


class Compression(enum.Enum):
    """Compression of the writer. The value is the byte in a block's trailer."""

    NONE = 0
    SNAPPY = 1
    LZ4 = 4
    ZSTD = 7

    @property
    def label(self) -> str:
        """The flag's form: ``none``, ``snappy``, ``lz4`` or ``zstd``."""
        return self.name.lower()

    @property
    def property_name(self) -> str:
        """Name in RocksDB's table properties."""
        return {"NONE": "NoCompression", "SNAPPY": "Snappy"}.get(self.name, self.name)

    @property
    def levels(self) -> range:
        """The levels it takes besides 0, which means the default."""
        return {"LZ4": range(1, 13), "ZSTD": range(-50, 23)}.get(self.name, range(0))

    @classmethod
    def from_label(cls, label: str) -> Compression:
        """Parse a label, in any case. Raises `UnsupportedFormat`."""
        try:
            return cls[label.strip().upper()]
        except KeyError:
            raise UnsupportedFormat(f"unknown compression {label!r}: zstd, lz4, snappy or none") from None


def compressor(compression: Compression, level: int) -> Compressor | None:
    """Return a function that compresses a block and adds the size prefix; None for `Compression.NONE`.

    Level 0 is the default: zstd 1, lz4 fast; others must be in `Compression.levels`. The function is not thread-safe.
    """
    match compression:
        case Compression.NONE:
            return None
        case Compression.SNAPPY:
            return _snappy_compressor()
        case Compression.LZ4:
            return _lz4_compressor(level)
        case Compression.ZSTD:
            return _zstd_compressor(level or 1)


def _snappy_compressor() -> Compressor:
    import pyarrow as pa

    compress = pa.Codec("snappy").compress
    return lambda block: (b"", compress(block, asbytes=True))


def _lz4_compressor(level: int) -> Compressor:
    if not level:
        import pyarrow as pa

        fast = pa.Codec("lz4_raw").compress  # a tenth less time than lz4.block
        return lambda block: (_size_prefix(len(block)), fast(block, asbytes=True))
    import lz4.block

    compress = lz4.block.compress
    settings: dict[str, Any] = {"mode": "high_compression", "compression": level, "store_size": False}
    return lambda block: (_size_prefix(len(block)), compress(block, **settings))


def _zstd_compressor(level: int) -> Compressor:
    import zstandard

    compress = zstandard.ZstdCompressor(level=level).compress
    return lambda block: (_size_prefix(len(block)), compress(block))


@functools.lru_cache(1 << 10)
def _size_prefix(size: int) -> bytes:
    return encode_varint(size)


class Decompressor:
    """Unpacks blocks of every method that RocksDB writes. Keeps its contexts: one per reader, one thread at a time."""

    def __init__(self) -> None:
        self._methods: dict[int, Unpacker] = {}

    def __call__(self, method: int, stored: Readable) -> Readable:
        """Unpack what the trailer's byte `method` says. Raises `DamagedBytes`, `UnsupportedFormat`."""
        if method == 0:
            return stored
        size, start = decode_varint(stored, bits=32)
        if size > MAX_BLOCK_SIZE:
            raise DamagedBytes(f"block declares an uncompressed size of {size} bytes")
        unpack = self._methods.get(method) or self._methods.setdefault(method, _unpacker(method))
        block = unpack(stored if method == Compression.SNAPPY.value else stored[start:], size)
        if len(block) != size:
            raise DamagedBytes(f"block unpacks to {len(block)} bytes instead of {size}")
        return block


def _unpacker(method: int) -> Unpacker:
    match method:
        case 1:
            return _snappy_unpacker()
        case 2:
            return _unpack_zlib
        case 3:
            return _unpack_bzip2
        case 4 | 5:
            return _lz4_unpacker()
        case 7:
            return _zstd_unpacker()
        case _:
            raise UnsupportedFormat(f"block compressed by method {method}")


def _snappy_unpacker() -> Unpacker:
    import pyarrow as pa

    decompress = pa.Codec("snappy").decompress

    def unpack(stored: Readable, size: int) -> Readable:
        try:
            block: bytes = decompress(stored, size, asbytes=True)
        except OSError as error:
            raise DamagedBytes(f"snappy block: {error}") from error
        return block

    return unpack


def _lz4_unpacker() -> Unpacker:
    import lz4.block

    def unpack(stored: Readable, size: int) -> Readable:
        try:
            block: bytes = lz4.block.decompress(stored, uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise DamagedBytes(f"lz4 block: {error}") from error
        return block

    return unpack


def _zstd_unpacker() -> Unpacker:
    import zstandard

    decompress = zstandard.ZstdDecompressor().decompress

    def unpack(stored: Readable, size: int) -> Readable:
        try:
            # The size in the frame's own header decides what the library allocates.
            framed = zstandard.frame_content_size(stored)
            if framed not in {size, -1}:
                raise DamagedBytes(f"zstd frame of {framed} bytes in a block of {size}")
            return decompress(stored, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedBytes(f"zstd block: {error}") from error

    return unpack


def _unpack_zlib(stored: Readable, size: int) -> Readable:
    try:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        return stream.decompress(stored, size + 1)
    except zlib.error as error:
        raise DamagedBytes(f"zlib block: {error}") from error


def _unpack_bzip2(stored: Readable, size: int) -> Readable:
    try:
        return bz2.BZ2Decompressor().decompress(stored, size + 1)
    except (OSError, EOFError) as error:
        raise DamagedBytes(f"bzip2 block: {error}") from error
