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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import environment
from tests.support.kernels import CALL_ALL, CALL_ONE
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


def test_a_fresh_installation_compiles_no_kernel(program: Path, compiled: Path, tmp_path: Path) -> None:
    """The wheel has every kernel of every module compiled: an empty cache of numba is filled from there."""
    python = program.resolve().parent / "python"
    counts = json.loads(run(str(python), "-c", CALL_ALL, NUMBA_CACHE_DIR=str(tmp_path)))
    assert {name for name, (_, misses, _) in counts.items() if misses} == set()
    assert sum(hits for hits, _, _ in counts.values()) > 20
    names = {name.split(".", 1)[1] for name in counts}
    assert names <= {name.split(".", 1)[1] for name in indexes(compiled)}, "a kernel that call_kernels never reaches"


@pytest.fixture(scope="module")
def compiled(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but `tikv_br.formats` of the wheel."""
    folder = tmp_path_factory.mktemp("compiled")
    with zipfile.ZipFile(core(release)) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("tikv_br/formats/")])
    (folder / "tikv_br/__init__.py").touch()
    return folder


def indexes(folder: Path) -> dict[str, bytes]:
    """The index files of numba's cache, by the names of their kernels."""
    found = (folder / "tikv_br/formats/compiled").rglob("*.nbi")
    return {path.name.split("-")[0]: path.read_bytes() for path in found}


def test_kernels_are_for_any_processor(compiled: Path) -> None:
    """The machine code is that of the architecture's least processor: it holds no instruction of a newer one."""
    for content in indexes(compiled).values():
        assert b"generic" in content
        assert b"+avx" not in content


def compile_one(folder: Path, cache: Path, **more: str) -> list[int]:
    """Call a kernel of a folder: how often it was found compiled, and not."""
    paths = {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(cache)}
    hits_and_misses: list[int] = json.loads(run(sys.executable, "-c", CALL_ONE, **paths, **more))
    return hits_and_misses


def test_kernels_of_other_sources_or_settings_are_not_used(compiled: Path, tmp_path: Path) -> None:
    """After a change to any module, or with bounds checks, kernels are compiled; without, the same call loads them."""
    assert compile_one(compiled, tmp_path / "same") == [1, 0]
    assert compile_one(compiled, tmp_path / "checks", NUMBA_BOUNDSCHECK="1") == [0, 1]
    shutil.copytree(compiled / "tikv_br", tmp_path / "tikv_br")
    with (tmp_path / "tikv_br/formats/kernels/addresses.py").open("a") as source:
        source.write("# another source\n")
    assert compile_one(tmp_path, tmp_path / "changed") == [0, 1]


def test_compiling_ahead_is_done_once_for_the_same_sources(compiled: Path, tmp_path: Path) -> None:
    """A second call leaves the folder as it is; one folder remains."""
    place = compiled / "tikv_br/formats/compiled"
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    paths = {"PYTHONPATH": str(compiled), "NUMBA_CACHE_DIR": str(tmp_path)}
    run(sys.executable, "-m", "tikv_br.formats.precompile", **paths)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    assert len(list(place.iterdir())) == 1


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
