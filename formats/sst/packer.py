"""Where sealed blocks go: compressed, with their checksums, into the file and its index. In a kernel where that is possible."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np

from formats.kernels import crc32c
from formats.sst import libraries, pack
from formats.sst.arena import Arena, address
from formats.sst.block_checksum import ChecksumType
from formats.sst.block_sink import BlockSink
from formats.sst.compression import Compression
from formats.sst.encode import SEALED, START
from formats.sst.index_builder import IndexBuilder
from formats.sst.pack import NO_PACKING, Packing

_OUTPUT = 1 << 20
"""Bytes of packed blocks before they are passed on: still in the processor's cache for the hash that is taken of them."""


class Packer(Protocol):
    """Packs the blocks of one table. One thread at a time."""

    packing: Packing
    """For kernels; may change when the arena grows."""
    most_blocks: int
    """How many blocks the arena should hold."""

    @property
    def waiting(self) -> int:
        """Bytes of packed blocks that have not reached the file yet."""

    def fit(self, arena: Arena) -> None:
        """Have room for the blocks of an arena, which has none of them."""

    def take(self, arena: Arena) -> None:
        """Take all sealed blocks; the open one goes to the arena's beginning."""

    def make_room(self, arena: Arena) -> None:
        """Do so when a kernel says `NO_ROOM`, or as much of it as lets it go on."""


class SingleBlocks:
    """Packs block by block, in any compression and with any checksum."""

    packing = NO_PACKING
    most_blocks = 16
    """1 MiB to a kernel call: compressed while it lies in the processor's caches."""
    waiting = 0

    def __init__(self, out: BlockSink, index: IndexBuilder) -> None:
        self._out = out
        self._index = index

    def fit(self, arena: Arena) -> None:
        """Blocks of any size will do."""

    def take(self, arena: Arena) -> None:
        """See `Packer`."""
        blocks, ends = arena.memory.data, arena.block_ends
        sizes = [self._out.write_compressed(blocks[start:end]) for start, end in pairwise([0, *ends])]
        self._index.add(arena.separators, arena.separator_ends, sizes)
        arena.restart(sum(ends[-1:]))

    make_room = take


class KernelPacker:
    """Has kernels pack as many blocks as the output holds; see `formats.sst.pack`."""

    packing = NO_PACKING
    most_blocks = 1

    def __init__(self, out: BlockSink, index: IndexBuilder, method: Compression, zstd: libraries.Zstd | None) -> None:
        """`zstd` is the context for `Compression.ZSTD`; lz4 needs none."""
        self._out = out
        self._index = index
        self._method = method
        self._zstd = zstd
        self._state = np.zeros(pack.STATE_SIZE, np.int64)

    @property
    def waiting(self) -> int:
        """See `Packer`."""
        return int(self._state[pack.FILLED])

    def fit(self, arena: Arena) -> None:
        """See `Packer`."""
        self._memory = np.empty(max(_OUTPUT, pack.room_for(arena.blocks.arena_size)), np.uint8)
        self._sizes = np.zeros(arena.blocks.most_sealed, np.int64)
        self.packing = Packing(
            state=address(self._state),
            sizes=address(self._sizes),
            out=address(self._memory),
            out_size=self._memory.size,
            method=self._method.value,
            compress_sizes=self._zstd.compress if self._zstd else 0,
            context=self._zstd.context if self._zstd else 0,
            compress_ints=libraries.lz4_compress() if self._method is Compression.LZ4 else 0,
        )

    def take(self, arena: Arena) -> None:
        """See `Packer`."""
        while self._state[pack.PACKED] < arena.state[SEALED]:
            if not pack.pack(arena.blocks, self.packing):
                self._pass_on()
        self._pass_on()
        sizes = self._sizes[: self._state[pack.PACKED]].tolist()
        self._index.add(arena.separators, arena.separator_ends, sizes)
        self._state[pack.PACKED] = self._state[pack.PLACE] = 0
        arena.restart(int(arena.state[START]))

    def make_room(self, arena: Arena) -> None:
        """See `Packer`."""
        if self._state[pack.PACKED] < arena.state[SEALED]:
            self._pass_on()  # the output was full
        else:
            self.take(arena)

    def _pass_on(self) -> None:
        """Empty the output."""
        if filled := self.waiting:
            self._out.append(self._memory[:filled].tobytes())
            self._state[pack.FILLED] = 0


def packer(out: BlockSink, index: IndexBuilder, compression: Compression, level: int) -> Packer:
    """One that does the same in the quickest way there is here. Levels are those of `SstOptions`."""
    if out.checksum is not ChecksumType.CRC32C or not crc32c.available():
        return SingleBlocks(out, index)
    match compression:
        case Compression.ZSTD:
            zstd = libraries.Zstd.open(level or 1)
            return SingleBlocks(out, index) if zstd is None else KernelPacker(out, index, compression, zstd)
        case Compression.LZ4 if not level and libraries.lz4_compress():
            return KernelPacker(out, index, compression, None)
        case Compression.NONE:
            return KernelPacker(out, index, compression, None)
    return SingleBlocks(out, index)
