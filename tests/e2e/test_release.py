"""The release as users get it: built with its kernels, installed from the wheels with ``uv tool`` and ``pipx``, and used as the README shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.command import environment
from tests.support.kernels import CALL_ALL
from tests.support.tools import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # what is installed has 700 MB
BIN = Path(sys.executable).parent
PATIENCE = 1500
USE = re.search(r"^## Use\n\n```console\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
SOURCE, TARGET, FOLLOWED = "10.0.0.1:2379", "10.9.0.1:2379", "10.8.0.1:2379"
"""The clusters of the README."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release, after all checks of the script that builds one, from a checkout in a folder that looks like a result."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = folder / "build/tmp/dist/checkout"
    left_out = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__", "dist", "build")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    (checkout / ".venv").symlink_to(BIN.parent)
    run(str(checkout / "scripts/build_release.sh"), str(folder / "release"))
    return folder / "release"


def whole(release: Path) -> str:
    """The wheel of tikv-br, which takes tikv-br-core from the same folder."""
    (built,) = release.glob("tikv_br-*.whl")
    return str(built)


def core(release: Path) -> str:
    """The wheel of tikv-br-core, which has the code."""
    (built,) = release.glob("tikv_br_core-*.whl")
    return str(built)


def run(*command: str, **more: str) -> str:
    """The output of a command that must succeed; ``more`` goes into its environment."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        cwd="/",  # not our checkout, whose packages a `python -m` would find first
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of these tests: PySpark, which has no wheel, would leave 1.4 GB more in the user's one each time."""
    return str(tmp_path_factory.mktemp("uv"))


def test_pipx_installs_the_slim_form(release: Path, tmp_path: Path, uv_cache: str) -> None:
    """With the versions that the tests ran with; nothing is installed beside ``tikv_br``."""
    places = {name: str(tmp_path / name) for name in ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR")}
    places["UV_CACHE_DIR"] = uv_cache
    arguments = f"--constraint {ROOT / 'constraints.txt'}"
    run(str(BIN / "pipx"), "install", "--python", sys.executable, "--pip-args", arguments, core(release), **places)
    assert run(str(tmp_path / "PIPX_BIN_DIR/tikv-br"), "--version").startswith("tikv-br 1.")
    (packages,) = (tmp_path / "PIPX_HOME/venvs/tikv-br-core/lib").glob("python*/site-packages")
    assert not [name for name in ("formats", "incremental", "tests", "bench") if (packages / name).exists()]


@pytest.fixture(scope="module")
def program(release: Path, uv_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tikv-br`` with the playground, installed by ``uv tool``."""
    folder = tmp_path_factory.mktemp("installed")
    places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin"), "UV_CACHE_DIR": uv_cache}
    versions = ["--constraints", str(ROOT / "constraints.txt"), "--find-links", str(release)]
    arguments = ["--python", sys.executable, *versions, f"{whole(release)}[playground]"]
    run(str(BIN / "uv"), "tool", "install", *arguments, **places)
    return folder / "bin/tikv-br"


def kernels(python: str | Path, **variables: str) -> dict[str, object]:
    """Call all kernels; see `CALL_ALL`."""
    found: dict[str, object] = json.loads(run(str(python), "-c", CALL_ALL, **variables))
    return found


def test_a_fresh_installation_compiles_no_kernel(program: Path, tmp_path: Path) -> None:
    """The wheel has every kernel that Python calls: numba, which is installed, is not even imported."""
    called = kernels(program.resolve().parent / "python", NUMBA_CACHE_DIR=str(tmp_path))
    assert called == {"by_extension": True, "numba": False, "compiled": []}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def compiled(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but `tikv_br.formats` of the wheel."""
    folder = tmp_path_factory.mktemp("compiled")
    with zipfile.ZipFile(core(release)) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("tikv_br/formats/")])
    (folder / "tikv_br/__init__.py").touch()
    return folder


def extension(folder: Path) -> Path:
    """The extension in a wheel; there is nothing beside it."""
    [found] = (folder / "tikv_br/formats/compiled").iterdir()
    return found


def test_kernels_are_for_any_processor(compiled: Path) -> None:
    """The machine code is that of the architecture's least processor: it uses no register that only newer ones have."""
    code = run("objdump", "--disassemble", str(extension(compiled)))
    assert "%xmm" in code
    assert not re.search("%[yz]mm", code)


def test_kernels_of_other_sources_or_settings_are_not_used(compiled: Path, tmp_path: Path) -> None:
    """After a change to any module, or with bounds checks, numba compiles; without, it is not imported."""
    paths = {"PYTHONPATH": str(compiled), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert kernels(sys.executable, **paths)["numba"] is False
    assert kernels(sys.executable, **paths, NUMBA_BOUNDSCHECK="1")["compiled"] != []
    shutil.copytree(compiled / "tikv_br", tmp_path / "tikv_br")
    with (tmp_path / "tikv_br/formats/kernels/addresses.py").open("a") as source:
        source.write("# another source\n")
    assert kernels(sys.executable, **paths | {"PYTHONPATH": str(tmp_path)})["compiled"] != []


def test_compiling_ahead_is_done_once_for_the_same_sources(compiled: Path, tmp_path: Path) -> None:
    """A second call leaves the file as it is."""
    before = extension(compiled).stat().st_mtime_ns
    paths = {"PYTHONPATH": str(compiled), "NUMBA_CACHE_DIR": str(tmp_path)}
    run(sys.executable, "-m", "tikv_br.formats.precompile", **paths)
    assert extension(compiled).stat().st_mtime_ns == before


def test_without_a_compiler_numba_is_prepared(compiled: Path, tmp_path: Path) -> None:
    """As on a machine that has Python only: the cache is filled, and where the extension is demanded, the reason is named."""
    shutil.copytree(compiled / "tikv_br", tmp_path / "tikv_br")
    extension(tmp_path).unlink()
    paths = {
        "PYTHONPATH": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": "/nowhere",
        "CC": "nothing",
    }
    command = [sys.executable, "-m", "tikv_br.formats.precompile"]
    done = subprocess.run(
        command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=300, check=False, cwd="/"
    )
    assert (done.returncode, "into numba's cache" in done.stderr) == (0, True), done.stderr
    assert list((tmp_path / "cache").rglob("*.nbi"))
    refused = subprocess.run(
        [*command, "--extension"],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
    )
    assert (refused.returncode, refused.stderr.startswith("the kernels cannot be compiled: ")) == (1, True), (
        refused.stderr
    )
