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
Unpacker = tuple[str, type[Exception] | tuple[type[Exception], ...], Callable[[Readable, int], Readable]]
"""Name of a method, the errors of its library, and a function of a stored block and its unpacked size."""


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
            import pyarrow as pa

            snappy = pa.Codec("snappy").compress
            return lambda block: (b"", snappy(block, asbytes=True))
        case Compression.LZ4 if not level:
            import pyarrow as pa

            fast = pa.Codec("lz4_raw").compress  # a tenth less time than lz4.block
            return lambda block: (_size_prefix(len(block)), fast(block, asbytes=True))
        case Compression.LZ4:
            import lz4.block

            compress = lz4.block.compress
            settings: dict[str, Any] = {"mode": "high_compression", "compression": level, "store_size": False}
            return lambda block: (_size_prefix(len(block)), compress(block, **settings))
        case Compression.ZSTD:
            import zstandard

            zstd = zstandard.ZstdCompressor(level=level or 1).compress
            return lambda block: (_size_prefix(len(block)), zstd(block))


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
        name, failures, unpack = self._methods.get(method) or self._methods.setdefault(method, _unpacker(method))
        try:
            block = unpack(stored if method == Compression.SNAPPY.value else stored[start:], size)
        except failures as error:
            raise DamagedBytes(f"{name} block: {error}") from error
        if len(block) != size:
            raise DamagedBytes(f"block unpacks to {len(block)} bytes instead of {size}")
        return block


def _unpacker(method: int) -> Unpacker:
    match method:
        case 1:
            import pyarrow as pa

            snappy = pa.Codec("snappy").decompress
            return "snappy", OSError, lambda stored, size: snappy(stored, size, asbytes=True)
        case 2:
            return "zlib", zlib.error, lambda data, size: zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
        case 3:
            return "bzip2", (OSError, EOFError), lambda data, size: bz2.BZ2Decompressor().decompress(data, size + 1)
        case 4 | 5:
            from lz4 import block as lz4_block

            return "lz4", lz4_block.LZ4BlockError, lambda data, size: lz4_block.decompress(data, uncompressed_size=size)
        case 7:
            return _zstd_unpacker()
        case _:
            raise UnsupportedFormat(f"block compressed by method {method}")


def _zstd_unpacker() -> Unpacker:
    import zstandard

    decompress = zstandard.ZstdDecompressor().decompress

    def unpack(stored: Readable, size: int) -> Readable:
        # The size in the frame's own header decides what the library allocates.
        framed = zstandard.frame_content_size(stored)
        if framed not in {size, -1}:
            raise DamagedBytes(f"zstd frame of {framed} bytes in a block of {size}")
        return decompress(stored, max_output_size=size, allow_extra_data=False)

    return "zstd", zstandard.ZstdError, unpack
