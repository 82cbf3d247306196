from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BY_NUMBA = {
    "NUMBA_OPT": "3"
}  # the default; but with a setting that could change code, none is taken that was compiled ahead


def result_of(folder: Path, code: str, **more: str) -> str:
    """Run a program in which numba compiles kernels, and return its output. It is a file, as code that belongs to none is not cached."""
    (folder / "kernel.py").write_text(f"from tikv_br.formats.jit import njit\n{code}")
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **BY_NUMBA, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": paths, **more}
    command = [sys.executable, str(folder / "kernel.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_kernel_is_compiled(tmp_path: Path) -> None:
    """The bare decorator and the one with options both give compiled functions."""
    code = (
        "def double(number): return number + number\n"
        "for kernel in (njit(double), njit(forceinline=True)(double)):\n"
        "    print(kernel(21), len(kernel.signatures))\n"
    )
    assert result_of(tmp_path, code) == "42 1\n42 1"


def test_a_kernel_without_a_place_for_its_cache_still_runs(tmp_path: Path) -> None:
    """Code that belongs to no file cannot be cached: it is compiled for the process alone instead of failing."""
    code = 'exec("@njit\\ndef double(n): return n + n\\nprint(double(21))")'
    assert result_of(tmp_path, code, NUMBA_CACHE_DIR="", TMPDIR=str(tmp_path)) == "42"


def test_a_kernel_whose_code_cannot_be_kept_still_runs(tmp_path: Path) -> None:
    """A full disk costs the cache, not the work."""
    code = (
        "import errno, numba.core.caching as caching\n"
        "def refuse(*_):\n"
        "    print('refused')\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "caching.IndexDataCacheFile.save = refuse\n"
        "@njit\n"
        "def triple(number): return 3 * number\n"
        "print(triple(14))\n"
    )
    assert result_of(tmp_path, code) == "refused\n42"


def test_a_kernel_runs_when_no_byte_can_be_written(tmp_path: Path) -> None:
    """Without any writable directory the code is compiled, and not cached."""
    code = (
        "import resource\n"
        "@njit\n"
        "def double(n): return n + n\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "assert double(21) == 42\n"
    )
    assert result_of(tmp_path, code) == ""


COUNT_COMPILATIONS = """
import json
from tikv_br.formats.kernels import memory
{meanwhile}
import numpy as np
memory.copy(np.zeros(8, np.uint8), 0, np.zeros(8, np.uint8), 0, 8)
print(json.dumps([sum(memory.copy.stats.cache_hits.values()), sum(memory.copy.stats.cache_misses.values())]))
"""


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
        env={**os.environ, **nowhere_else, **BY_NUMBA, "TMPDIR": str(temporary)},
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


@pytest.mark.slow
def test_hostile_bytes_lead_no_kernel_out_of_its_arrays(tmp_path: Path) -> None:
    """The tests of hostile bytes, with numba's checks of bounds: the extension has none. They also run the kernels that arm64 gets."""
    hostile = "any_bytes or damage or truncations or flipped"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow"]
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "-k", hostile, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | checks,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*.nbi"))
