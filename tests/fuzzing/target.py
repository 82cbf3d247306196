"""What is fuzzed: how its inputs are made and damaged, and what reads them."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY = 1 << 30
"""Bytes that a run may map beyond what it has."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of untrusted bytes."""

    sound: Callable[[Path], list[bytes]]
    """Makes inputs of our own, with an empty folder to work in."""
    recorded: Callable[[Path], list[bytes]]
    """Finds those of real servers, below the folder of golden data."""
    damaged: Callable[[random.Random, bytes], bytes]
    """Changes one."""
    read: Callable[[bytes], str]
    """Reads one: what became of it. Whatever it raises is a fault."""


def outcomes(
    target: Target, originals: list[bytes], seed: int, count: int, note: Callable[[bytes], object] = lambda _data: None
) -> Iterator[str]:
    """What became of each of so many damaged inputs; ``note`` is given each before anything reads it."""
    random_ = random.Random(seed)
    for _ in range(count):
        data = target.damaged(random_, random_.choice(originals))
        note(data)
        yield target.read(data)


def limit_memory(size: int) -> tuple[int, int]:
    """Let the process map at most `size` bytes more than it has, so that huge allocations fail; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, before[1]))
    return before
