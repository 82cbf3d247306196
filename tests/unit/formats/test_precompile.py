from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels import CALL_ALL
from tikv_br import formats

PACKAGE = Path(formats.__file__).parent
CALL_ONE = """
import json
from tikv_br.formats import rawscan
rawscan.measure(b"")
from tikv_br.formats.kernels.rawscan import measure
print(json.dumps([sum(measure.stats.cache_hits.values()), sum(measure.stats.cache_misses.values())]))
"""


def run(folder: Path, *arguments: str, cache: str, **environment: str) -> str:
    """The output of a Python with the copy of `formats` in a folder, and a cache of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    paths = {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / cache)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**plain, **paths, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    ).stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of `formats` whose kernels were compiled ahead."""
    folder = tmp_path_factory.mktemp("precompiled")
    shutil.copytree(PACKAGE, folder / "tikv_br/formats", ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    (folder / "tikv_br/__init__.py").touch()
    run(folder, "-m", "tikv_br.formats.precompile", cache="unused")
    return folder


@pytest.mark.slow
def test_a_process_with_an_empty_cache_compiles_nothing(compiled: Path) -> None:
    """Every kernel of every module was compiled ahead, and a fresh process loads all instead of compiling any."""
    counts: dict[str, list[int]] = json.loads(run(compiled, "-c", CALL_ALL, cache="empty"))
    assert {name for name, (_, misses, _) in counts.items() if misses} == set()
    assert sum(hits for hits, _, _ in counts.values()) > 20
    found = {path.name.split("-")[0] for path in (compiled / "tikv_br/formats/compiled").rglob("*.nbi")}
    names = {name.split(".", 1)[1] for name in counts}
    assert names - {name.split(".", 1)[1] for name in found} == set(), "a kernel that call_kernels never reaches"


@pytest.mark.slow
def test_code_is_for_any_processor(compiled: Path) -> None:
    """The machine code is that of the architecture's least processor: it holds no instruction of a newer one."""
    for index in (compiled / "tikv_br/formats/compiled").rglob("*.nbi"):
        assert b"generic" in index.read_bytes()
        assert b"+avx" not in index.read_bytes()


@pytest.mark.slow
def test_code_of_other_sources_or_settings_is_not_used(compiled: Path, tmp_path: Path) -> None:
    """After a change to any module, or with bounds checks, kernels are compiled; without, the same call loads them."""
    assert json.loads(run(compiled, "-c", CALL_ONE, cache="same")) == [1, 0]
    assert json.loads(run(compiled, "-c", CALL_ONE, cache="checks", NUMBA_BOUNDSCHECK="1")) == [0, 1]
    shutil.copytree(compiled / "tikv_br", tmp_path / "tikv_br")
    with (tmp_path / "tikv_br/formats/kernels/addresses.py").open("a") as source:
        source.write("# another source\n")
    assert json.loads(run(tmp_path, "-c", CALL_ONE, cache="changed")) == [0, 1]


@pytest.mark.slow
def test_compiling_ahead_is_done_once_for_the_same_sources(compiled: Path) -> None:
    """A second call leaves the folder as it is; one folder remains."""
    before = {path: path.stat().st_mtime_ns for path in (compiled / "tikv_br/formats/compiled").rglob("*")}
    run(compiled, "-m", "tikv_br.formats.precompile", cache="again")
    assert {path: path.stat().st_mtime_ns for path in (compiled / "tikv_br/formats/compiled").rglob("*")} == before
    assert len(list((compiled / "tikv_br/formats/compiled").iterdir())) == 1
