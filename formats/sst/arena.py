"""The memory that the kernels of a writer fill."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tikv_br.formats.sst import encode

_BLOCKS = 16
"""Blocks in the arena: 1 MiB at the default block size, which stays in the processor's cache until it is compressed."""
_MAX_SEALED = 512
"""Maximum number of blocks per kernel call."""
_SMALLEST_ROW = 11
"""Bytes that a row takes in a block at least: three lengths and the end of the key."""
_SEPARATORS = 16 << 10
"""Bytes for separators, unless keys are longer."""


class Arena:
    """The memory that kernels fill: sealed blocks, then the open one; beside them keys, restarts and separators."""

    def __init__(self, block_size: int, restart_interval: int) -> None:
        self.state = np.zeros(encode.STATE_SIZE, np.int64)
        self.state[encode.LAST_LENGTH] = -1
        self.memory = np.empty(_BLOCKS * block_size + encode.SLACK, np.uint8)
        self._block_size = block_size
        self._restart_interval = restart_interval
        self._restarts = np.empty(block_size // _SMALLEST_ROW + 2, np.uint32)
        self._ends = np.zeros((2, _MAX_SEALED), np.int64)
        self.reserve(0)

    @property
    def last_key(self) -> bytes:
        """The key of the last row; there is one."""
        return self._key(int(self.state[encode.SLOT]), encode.LAST_LENGTH)

    @property
    def next_key(self) -> bytes:
        """The key of the next row, which a kernel has written."""
        return self._key(1 - int(self.state[encode.SLOT]), encode.LENGTH)

    def sealed(self) -> tuple[list[int], bytes, list[int]]:
        """Return the end offset of each sealed block, and the internal keys that separate it from the next with their end offsets."""
        count = self.state[encode.SEALED]
        separators = self._separators[: self.state[encode.SEPARATED]].tobytes()
        return self._ends[0, :count].tolist(), separators, self._ends[1, :count].tolist()

    def reserve(self, longest_key: int) -> None:
        """Make room for keys of this length; there are no sealed blocks."""
        last, slot = b"" if self.state[encode.LAST_LENGTH] < 0 else self.last_key, int(self.state[encode.SLOT])
        self._keys = np.zeros((2, longest_key + encode.SLACK), np.uint8)
        self._keys[slot, : len(last)] = np.frombuffer(last, np.uint8)
        self._separators = np.empty(max(_SEPARATORS, longest_key + encode.KEY_TRAILER), np.uint8)
        self._point()

    def has_slots_for(self, longest_key: int) -> bool:
        """Return whether `reserve` was called for keys of that length."""
        return longest_key + encode.SLACK <= self._keys.shape[1]

    def grow(self, size: int) -> None:
        """Make room for a block of this size; the arena is empty."""
        self.memory = np.empty(size + encode.SLACK, np.uint8)
        self._point()

    def restart(self, start: int) -> None:
        """Drop the sealed blocks: the open one, at `start`, moves to the beginning."""
        size = int(self.state[encode.SIZE])
        self.memory[:size] = self.memory[start : start + size]
        self.state[encode.START] = self.state[encode.SEALED] = self.state[encode.SEPARATED] = 0

    def _point(self) -> None:
        self.blocks = encode.Blocks(
            state=_address(self.state),
            arena=_address(self.memory),
            arena_size=self.memory.size - encode.SLACK,
            restarts=_address(self._restarts),
            ends=_address(self._ends[0]),
            separator_ends=_address(self._ends[1]),
            most_sealed=_MAX_SEALED,
            keys=_address(self._keys),
            slot_size=self._keys.shape[1],
            separators=_address(self._separators),
            separators_size=self._separators.size,
            block_size=self._block_size,
            restart_interval=self._restart_interval,
        )

    def _key(self, slot: int, length: int) -> bytes:
        return self._keys[slot, : self.state[length]].tobytes()


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)
