from __future__ import annotations

import subprocess
import sys

from formats.jit import njit


def test_a_kernel_is_compiled() -> None:
    """The bare decorator and the one with options both give compiled functions."""

    def double(number: int) -> int:
        return number + number

    for kernel in (njit(double), njit(forceinline=True)(double)):
        assert kernel(21) == 42
        assert getattr(kernel, "signatures", None), "numba has compiled nothing"


def test_a_kernel_without_a_place_for_its_cache_still_runs() -> None:
    """Code that belongs to no file cannot be cached: it is compiled for the process alone instead of failing."""
    program = 'exec("from formats.jit import njit\\n@njit\\ndef double(n): return n + n\\nprint(double(21))")'
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "42\n"
