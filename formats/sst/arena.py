"""The memory in which kernels build data blocks, and what lies in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from formats.sst import encode

_MOST_SEALED = 512
"""Blocks between two returns to Python, at most."""
_SMALLEST_ROW = 11
"""Bytes that a row takes in a block at least: three lengths and the end of the key."""
_SEPARATORS = 16 << 10
"""Bytes for separators, unless keys are longer."""


class Arena:
    """Sealed blocks one behind the other, then the open one; beside them keys, restarts and separators."""

    def __init__(self, block_size: int, restart_interval: int, most_blocks: int) -> None:
        """Room for `most_blocks` of `block_size`; if that is 1, kernels end after each."""
        self.state = np.zeros(encode.STATE_SIZE, np.int64)
        self.state[encode.LAST_LENGTH] = -1
        self.memory = np.empty(most_blocks * block_size + encode.SLACK, np.uint8)
        self._block_size = block_size
        self._restart_interval = restart_interval
        self._one_by_one = most_blocks == 1
        self._restarts = np.empty(block_size // _SMALLEST_ROW + 2, np.uint32)
        self._ends = np.zeros((2, _MOST_SEALED), np.int64)
        self.reserve(0)

    @property
    def last_key(self) -> bytes:
        """That of the row appended last; there is one."""
        return self._key(int(self.state[encode.SLOT]), encode.LAST_LENGTH)

    @property
    def next_key(self) -> bytes:
        """That of the row that comes next: a kernel has written it."""
        return self._key(1 - int(self.state[encode.SLOT]), encode.LENGTH)

    @property
    def block_ends(self) -> list[int]:
        """Where each sealed block ends."""
        ends: list[int] = self._ends[0, : self.state[encode.SEALED]].tolist()
        return ends

    @property
    def separator_ends(self) -> list[int]:
        """Where each of their `separators` ends."""
        ends: list[int] = self._ends[1, : self.state[encode.SEALED]].tolist()
        return ends

    @property
    def separators(self) -> bytes:
        """Of each sealed block the internal key that separates it from the next."""
        return self._separators[: self.state[encode.SEPARATED]].tobytes()

    def reserve(self, longest_key: int) -> None:
        """Have slots and separators for such keys."""
        last, slot = b"" if self.state[encode.LAST_LENGTH] < 0 else self.last_key, int(self.state[encode.SLOT])
        self._keys = np.zeros((2, longest_key + encode.SLACK), np.uint8)
        self._keys[slot, : len(last)] = np.frombuffer(last, np.uint8)
        self._separators = np.empty(max(_SEPARATORS, longest_key + encode.TRAILER_SIZE), np.uint8)
        self._point()

    def has_slots_for(self, longest_key: int) -> bool:
        """Whether `reserve` was called for keys of that length."""
        return longest_key + encode.SLACK <= self._keys.shape[1]

    def grow(self, size: int) -> None:
        """Have room for a block of that size, when there is none."""
        self.memory = np.empty(size + encode.SLACK, np.uint8)
        self._point()

    def restart(self, start: int) -> None:
        """Drop sealed blocks: the open one, at `start`, goes to the beginning."""
        size = int(self.state[encode.SIZE])
        self.memory[:size] = self.memory[start : start + size]
        self.state[encode.START] = self.state[encode.SEALED] = self.state[encode.SEPARATED] = 0

    def _point(self) -> None:
        """Tell the kernels where the memory is."""
        self.blocks = encode.Blocks(
            state=address(self.state),
            arena=address(self.memory),
            arena_size=self.memory.size - encode.SLACK,
            restarts=address(self._restarts),
            ends=address(self._ends[0]),
            separator_ends=address(self._ends[1]),
            most_sealed=_MOST_SEALED,
            keys=address(self._keys),
            slot_size=self._keys.shape[1],
            separators=address(self._separators),
            separators_size=self._separators.size,
            block_size=self._block_size,
            restart_interval=self._restart_interval,
            one_by_one=self._one_by_one,
        )

    def _key(self, slot: int, length: int) -> bytes:
        return self._keys[slot, : self.state[length]].tobytes()


def address(array: npt.NDArray[np.generic]) -> int:
    """Where an array lies."""
    return int(array.ctypes.data)
