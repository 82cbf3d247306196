"""The release as users get it: built with its kernels, installed from the wheels with ``uv tool`` and ``pipx``, and used as the README shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import environment
from tests.support.kernels import CALL_ALL
from tests.support.ports import reserved_ports
from tests.support.tools import ROOT
from tests.support.waiting import eventually

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


def kernels(python: str | Path, **variables: str) -> dict[str, Any]:
    """Call all kernels; see `CALL_ALL`."""
    found: dict[str, Any] = json.loads(run(str(python), "-c", CALL_ALL, **variables))
    return found


def test_a_fresh_installation_compiles_no_kernel(program: Path, tmp_path: Path) -> None:
    """The wheel has every kernel that Python calls: numba, which is installed, is not even imported."""
    called = kernels(program.resolve().parent / "python", NUMBA_CACHE_DIR=str(tmp_path))
    assert called == {"by_extension": True, "numba": False, "signatures": {}}
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
    """The machine code is that of the architecture's least processor: it has no instruction of AVX, FMA or BMI."""
    code = run("objdump", "--disassemble", str(extension(compiled)))
    assert "%xmm" in code
    newer = re.search(r"%[yz]mm|\t(v[a-z]\w+|andn|bextr|bls\w+|mulx|pdep|pext|rorx|s[ah][lr]x)\s", code)
    assert newer is None, newer


def test_kernels_of_other_sources_or_settings_are_not_used(compiled: Path, tmp_path: Path) -> None:
    """After a change to any module, or with bounds checks, numba compiles; without, it is not imported."""
    paths = {"PYTHONPATH": str(compiled), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert kernels(sys.executable, **paths)["numba"] is False
    signatures = kernels(sys.executable, **paths, NUMBA_BOUNDSCHECK="1")["signatures"]
    assert len(signatures) > 20
    assert all(signatures.values()), "a kernel that call_kernels never reaches, so that the extension does not have it"
    shutil.copytree(compiled / "tikv_br", tmp_path / "tikv_br")
    with (tmp_path / "tikv_br/formats/kernels/addresses.py").open("a") as source:
        source.write("# another source\n")
    changed = paths | {"PYTHONPATH": str(tmp_path)}
    assert run(sys.executable, "-c", "from tikv_br.formats import jit; print(jit.EXTENSION)", **changed) == "None\n"


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
    assert (refused.returncode, refused.stderr.startswith("error: the kernels cannot be compiled: ")) == (1, True), (
        refused.stderr
    )


@pytest.fixture
def clusters(program: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder whose playgrounds are stopped at the end."""
    folder = tmp_path / "clusters"
    folder.mkdir()
    yield folder
    for each in folder.iterdir():
        run(str(program), "playground", "stop", "--dir", str(each))


def test_the_tutorial_works_word_for_word(program: Path, tmp_path: Path) -> None:
    """In an environment with nothing but the release; only folder and port are the test's own. What it shows is printed."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks[1:]).splitlines()  # the first installs
    script = "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    with reserved_ports(1) as (port,):
        script = script.replace("/tmp/tutorial", str(tmp_path / "tutorial")).replace("12379", str(port))
        printed = run("bash", "-euo", "pipefail", "-c", script, PATH=f"{program.parent}:{os.environ['PATH']}")
    shown = [line for line in lines if not line.startswith("$ ")]
    assert shown
    assert [line for line in printed.splitlines() if line in shown] == shown


def test_the_commands_of_the_readme_work_from_there(program: Path, clusters: Path, tmp_path: Path) -> None:
    """Each of them succeeds on playgrounds, with folders instead of buckets; what was backed up is in the target."""
    assert USE is not None
    pds = {
        address: playground(program, clusters, api)
        for address, api in ((SOURCE, "v1"), (TARGET, "v2"), (FOLLOWED, "v2"))
    }
    folder = tmp_path / "storage"
    for address in (SOURCE, FOLLOWED):
        run(str(program), "raw", "put", "--pd", pds[address], "key", "value")
    run(
        str(program),
        "backup",
        "raw",
        "--pd",
        pds[FOLLOWED],
        "--storage",
        str(folder / "backups/2026-11-22"),
        "--gc-ttl",
        "1h",
    )
    table = tmp_path / "users.parquet"
    pq.write_table(pa.table({"id": ["user1", "user2"], "profile": ["one", "two"]}), table)

    def local(text: str) -> str:
        for address, pd in pds.items():
            text = text.replace(address, pd)
        text = re.sub(r"'?s3://([\w/-]+)[^\s']*'?", rf"{folder}/\1", text)
        return text.replace("/lake/users.parquet", str(table)).replace("/var/lib/tikv-br", str(tmp_path / "state"))

    commands = [shlex.split(local(line.removeprefix("$ "))) for line in USE[1].splitlines()]
    by_name = {" ".join(each[1:3]) if each[2] == "raw" else each[1]: [str(program), *each[1:]] for each in commands}
    for name in ("check", "backup raw", "restore raw", "verify", "diff", "load raw"):
        run(*by_name.pop(name), JAVA_TOOL_OPTIONS="-XX:TieredStopAtLevel=1")
    rows = [
        json.loads(line)
        for line in run(str(program), "raw", "scan", "--pd", pds[TARGET], "--output", "json").splitlines()
    ]
    assert {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in rows if "key" in row} == {
        b"key": b"value",
        b"user1": b"one",
        b"user2": b"two",
    }
    sync(by_name.pop("sync"), program, pds)
    assert not by_name


def playground(program: Path, folder: Path, api_version: str) -> str:
    """Start a playground, and return the address of its PD."""
    place = folder / str(len(list(folder.iterdir())))
    started = run(
        str(program),
        "playground",
        "start",
        "--detach",
        "--dir",
        str(place),
        "--api-version",
        api_version,
        "--output",
        "json",
    )
    return str(json.loads(started.splitlines()[-1])["pd"])


def sync(command: list[str], program: Path, pds: dict[str, str]) -> None:
    """Follow a cluster until a change has arrived; SIGTERM ends it as it should."""
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            run(str(program), "raw", "put", "--pd", pds[FOLLOWED], "later", "change")

            def arrived() -> bool:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                scanned = run(str(program), "raw", "scan", "--pd", pds[TARGET], "--output", "json")
                return b"later".hex() in scanned

            eventually(arrived, PATIENCE)
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 143
