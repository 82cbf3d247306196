"""Where the blocks of a table go: compressed, sealed with their checksums and passed on in chunks."""

from __future__ import annotations

import struct
from collections.abc import Callable

from formats.sst.block_checksum import ChecksumType
from formats.sst.coding import BlockHandle, Readable
from formats.sst.compression import Compression, Compressor, compressor
from formats.sst.footer import TRAILER_SIZE
from formats.sst.pack import MOST_SKIPPED

Sink = Callable[[bytes], object]

_CHUNK = 1 << 20
"""Bytes given to the sink at once, about."""
_TRAILER = struct.Struct("<BI")


class BlockSink:
    """Writes blocks to a sink. One thread at a time."""

    def __init__(self, sink: Sink, compression: Compression, level: int, checksum: ChecksumType) -> None:
        self.checksum = checksum
        self.offset = self._flushed = 0
        self._sink = sink
        self._method = compression.value
        self._compress = compressor(compression, level)
        self._sum = checksum.function
        self._misses = self._skip = 0
        self._pieces: list[bytes] = []

    def write(self, block: bytes) -> BlockHandle:
        """Write a block as it is."""
        return BlockHandle(self.offset, self._seal(b"", block, 0))

    def write_compressed(self, block: Readable) -> int:
        """Write a block, compressed where that saves an eighth at least; its size without the trailer.

        The block's memory may change afterwards.
        """
        pieces = self._packed(block, self._compress) if self._compress else None
        return self._seal(b"", bytes(block), 0) if pieces is None else self._seal(*pieces, self._method)

    def append(self, blocks: bytes) -> None:
        """Write blocks that have their trailers already."""
        self._pieces.append(blocks)
        self.offset += len(blocks)
        self._flush()

    def end(self, footer: bytes) -> None:
        """Write the footer and all that waits."""
        self._pieces.append(footer)
        self.offset += len(footer)
        self._flush()

    def _seal(self, prefix: bytes, body: bytes, method: int) -> int:
        pieces = (prefix, body, _TRAILER.pack(method, self._sum((prefix, body), method)))
        self._pieces += pieces
        size = len(prefix) + len(body)
        self.offset += size + TRAILER_SIZE
        if self.offset - self._flushed >= _CHUNK:
            self._flush()
        return size

    def _packed(self, block: Readable, compress: Compressor) -> tuple[bytes, bytes] | None:
        """The block compressed, or None where that is not worth it: then the next ones are not even tried."""
        if self._skip:
            self._skip -= 1
            return None
        pieces = prefix, body = compress(block)
        if len(prefix) + len(body) < len(block) - len(block) // 8:
            self._misses = 0
            return pieces
        self._misses = self._skip = min(2 * self._misses + 1, MOST_SKIPPED)
        return None

    def _flush(self) -> None:
        chunk = b"".join(self._pieces)
        self._pieces.clear()
        self._flushed = self.offset
        self._sink(chunk)
