"""Runs the kernels that make data blocks, and hands the blocks on."""

from __future__ import annotations

from collections.abc import Callable

from formats.errors import DamagedBytes, UnsortedKeys, UnsupportedFormat
from formats.kernels.addresses import Int
from formats.sst import encode
from formats.sst.arena import Arena
from formats.sst.compression import MAX_BLOCK_SIZE
from formats.sst.encode import Blocks
from formats.sst.index_builder import ENTRY_ESTIMATE
from formats.sst.pack import Packing
from formats.sst.packer import Packer

Kernel = Callable[[Blocks, Packing], Int]


class BlockBuilder:
    """Builds the data blocks of one table. One thread at a time."""

    def __init__(self, packer: Packer, block_size: int, restart_interval: int) -> None:
        """`packer` gets the blocks in order."""
        self._packer = packer
        self._arena = Arena(block_size, restart_interval, packer.most_blocks)
        packer.fit(self._arena)

    @property
    def waiting_bytes(self) -> int:
        """What has not reached the packer's file and index yet, not all of it compressed."""
        state = self._arena.state
        blocks = int(state[encode.START] + state[encode.SIZE]) + self._packer.waiting
        return blocks + int(state[encode.SEPARATED] + state[encode.SEALED] * ENTRY_ESTIMATE)

    @property
    def entries(self) -> int:
        """Rows so far."""
        return int(self._arena.state[encode.ROWS])

    @property
    def key_bytes(self) -> int:
        """Bytes of their keys, without what makes them internal keys."""
        return int(self._arena.state[encode.KEY_BYTES])

    @property
    def value_bytes(self) -> int:
        """Bytes of their values."""
        return int(self._arena.state[encode.VALUE_BYTES])

    @property
    def last_key(self) -> bytes:
        """That of the row appended last; there is one."""
        return self._arena.last_key

    def run(self, kernel: Kernel, longest_key: int) -> None:
        """Have the kernel append rows whose storage keys have at most so many bytes.

        Raises `UnsortedKeys`, `UnsupportedFormat` for a row larger than any store takes, `DamagedBytes`.
        """
        arena = self._arena
        if not arena.has_slots_for(longest_key):
            self._packer.take(arena)
            arena.reserve(longest_key)
        arena.state[encode.CURSOR] = 0
        while result := kernel(arena.blocks, self._packer.packing):
            if result != encode.NO_ROOM:
                raise self._error(result)
            self._make_room()

    def finish(self) -> None:
        """End the open block, after at least one row."""
        while not encode.seal(self._arena.blocks, 0, 0, 0):
            self._packer.take(self._arena)
        self._packer.take(self._arena)

    def _make_room(self) -> None:
        arena = self._arena
        need = int(arena.state[encode.NEED])
        arena.state[encode.NEED] = 0
        if need > MAX_BLOCK_SIZE:
            raise UnsupportedFormat(f"row that makes a block of {need} bytes")
        self._packer.make_room(arena)
        # Where the arena is too small, the open block is empty: beside others the row would not have been tried.
        if need > arena.blocks.arena_size and not arena.state[encode.SEALED]:
            arena.grow(need)
            self._packer.fit(arena)

    def _error(self, result: Int) -> Exception:
        if result == encode.OUTSIDE:
            return DamagedBytes("the cluster answered with a key outside of the keyspace")
        if result == encode.DAMAGED:
            return DamagedBytes("the page is not the one that was measured")
        return UnsortedKeys(f"key {self._arena.next_key.hex()} does not sort after {self.last_key.hex()}")
