from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tikv_br.formats.jit import njit


def test_a_kernel_is_compiled() -> None:
    """The bare decorator and the one with options both give compiled functions."""

    def double(number: int) -> int:
        return number + number

    for kernel in (njit(double), njit(forceinline=True)(double)):
        assert kernel(21) == 42
        assert getattr(kernel, "signatures", None), "numba has compiled nothing"


def test_a_kernel_without_a_place_for_its_cache_still_runs(tmp_path: Path) -> None:
    """Code that belongs to no file cannot be cached: it is compiled for the process alone instead of failing."""
    program = 'exec("from tikv_br.formats.jit import njit\\n@njit\\ndef double(n): return n + n\\nprint(double(21))")'
    command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout == "42\n"


def test_a_kernel_whose_code_cannot_be_kept_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the cache, not the work."""

    def refuse(*_: object) -> None:
        refused.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    refused: list[bool] = []
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", refuse)

    def triple(number: int) -> int:
        return 3 * number

    assert njit(triple)(14) == 42
    assert refused


def test_a_kernel_runs_when_no_byte_can_be_written(tmp_path: Path) -> None:
    """Without any writable directory the code is compiled, and not cached."""
    (tmp_path / "kernel.py").write_text(
        "import resource\n"
        "from tikv_br.formats.jit import njit\n"
        "@njit\n"
        "def double(n): return n + n\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "assert double(21) == 42\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    command = [sys.executable, str(tmp_path / "kernel.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


COUNT_COMPILATIONS = """
import json
from tikv_br.formats.kernels import memory
{meanwhile}
import numpy as np
memory.copy(np.zeros(8, np.uint8), 0, np.zeros(8, np.uint8), 0, 8)
print(json.dumps([sum(memory.copy.stats.cache_hits.values()), sum(memory.copy.stats.cache_misses.values())]))
"""


NOT_AHEAD = {
    "NUMBA_OPT": "3"
}  # the default; but with a setting that could change code, none is taken that was compiled ahead


def compilations(temporary: Path, meanwhile: str = "") -> list[int]:
    """How many kernels a new process has found compiled, and how many it has compiled, where it may write below ``temporary`` only.

    ``meanwhile`` is done after its imports.
    """
    nowhere_else = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_COMPILATIONS.format(meanwhile=meanwhile)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **nowhere_else, **NOT_AHEAD, "TMPDIR": str(temporary)},
    )
    found: list[int] = json.loads(done.stdout)
    return found


def test_workers_without_a_home_compile_once_a_machine(tmp_path: Path) -> None:
    """With a package and a home that cannot be written to, the second process finds what the first has compiled."""
    assert compilations(tmp_path) == [0, 1]
    assert compilations(tmp_path) == [1, 0]
    assert [folder.stat().st_mode & 0o077 for folder in tmp_path.iterdir()] == [0]


def test_code_that_others_could_have_written_is_not_run(tmp_path: Path) -> None:
    """A folder that is open to others is left alone: the process compiles for itself, and writes nothing there."""
    open_to_all = tmp_path / f"tikv-br-kernels-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert compilations(tmp_path) == compilations(tmp_path) == [0, 1]
    assert list(open_to_all.iterdir()) == []


@pytest.mark.slow
def test_a_folder_that_another_takes_over_later_is_not_trusted(tmp_path: Path) -> None:
    """A process that has begun, and compiles its first kernel when the folder is open to others, neither reads nor writes there."""
    folder = tmp_path / f"tikv-br-kernels-{os.getuid()}"
    assert compilations(tmp_path) == [0, 1]
    before = sorted(folder.rglob("*"))
    assert compilations(tmp_path, f"import os; os.chmod({str(folder)!r}, 0o777)") == [0, 1]
    assert sorted(folder.rglob("*")) == before
