"""``tikv-br-core`` without PySpark, pandas, numba and boto3: its wheel, beside the packages that it requires and no others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.e2e.command import environment, succeed
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.tools import ROOT
from tests.support.waiting import eventually
from tikv_br.formats.api_version import ApiVersion

pytestmark = pytest.mark.slow
HEAVY = ("boto3", "botocore", "llvmlite", "numba", "pandas", "py4j", "pyspark")


def required(names: list[str]) -> Iterator[str]:
    """The distributions that requirements without extra lead to, by name."""
    waiting, seen = names, set()
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop())[0].lower()
        if name not in seen:
            seen.add(name)
            yield name
            waiting += [each for each in distribution(name).requires or () if ";" not in each]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tikv-br`` of a virtual environment with that wheel; what it requires is linked from the environment of the tests."""
    folder = tmp_path_factory.mktemp("core")

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "tikv_br.formats.precompile", "--extension")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("tikv_br_core-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = str(folder / "venv/bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    metadata = next(packages.glob("tikv_br_core-*.dist-info")) / "METADATA"
    lines = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    for name in required(lines):
        installed = distribution(name)
        for top in {each.parts[0] for each in installed.files or () if each.parts[0] not in {"..", "__pycache__"}}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(installed.locate_file(top)))
    assert not [name for name in HEAVY if (packages / name).exists()]
    return folder / "venv/bin/tikv-br"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveCluster, LiveCluster]]:
    """Two clusters of API V2."""
    folder = tmp_path_factory.mktemp("clusters")
    with (
        live_cluster(folder / "a", ApiVersion.V2, stores=1) as one,
        live_cluster(folder / "b", ApiVersion.V2, stores=1) as two,
    ):
        yield one, two


def run(program: Path, *arguments: str, code: int = 0) -> list[dict[str, object]]:
    """The JSON lines of a command, which ends with this code."""
    command = [str(program), *arguments, "--output", "json"]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=""), cwd="/", capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == code, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_backup_is_made_verified_listed_restored_and_followed(
    program: Path, tmp_path: Path, pair: tuple[LiveCluster, LiveCluster]
) -> None:
    """On threads, with the kernels of the wheel; the other cluster then has what the first one had, and what it was given later."""
    source, target = pair
    storage = tmp_path / "backups"
    succeed("raw", "import", "--pd", source.pd, "--count", "3000", "--seed", "7")
    summary = run(program, "backup", "raw", "--pd", source.pd, "--storage", f"{storage}/one", "--gc-ttl", "1h")[-1]
    assert summary["total_kvs"] == 3000
    for level in ("files", "data"):
        run(program, "verify", f"{storage}/one", "--level", level)
    assert len([each for each in run(program, "list", str(storage)) if each["message_type"] == "backup"]) == 1
    assert run(program, "restore", "raw", f"{storage}/one", "--pd", target.pd)[-1]["total_kvs"] == 3000
    run(program, "verify", f"{storage}/one", "--pd", target.pd, "--level", "restore")
    command = [str(program), "sync", "--pd", source.pd, "--from-backup", f"{storage}/one", "--sink"]
    command += [f"tikv://{target.pd}", "--state-dir", str(tmp_path / "state"), "--hold-back", "0s"]
    with subprocess.Popen(command, env=environment(PYTHONPATH=""), cwd="/", stderr=subprocess.PIPE) as process:
        try:
            succeed("raw", "put", "--pd", source.pd, "later", "change")

            def arrived() -> bool:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                scanned = succeed("raw", "scan", "--pd", target.pd, "--start", "later", "--limit", "1").out
                return "later" in scanned

            eventually(arrived, 60)
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    assert run(program, "diff", "--pd", source.pd, "--other-pd", target.pd)[-1]["message_type"] != "exit_error"


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    program: Path, tmp_path: Path, pair: tuple[LiveCluster, LiveCluster]
) -> None:
    """Exit code 50 for Spark, 56 for other packages; `check` and `version` work."""
    pd = pair[0].pd
    storage = f"{tmp_path}/backup"
    succeed("raw", "put", "--pd", pd, "key", "value")
    spark = ["backup", "raw", "--pd", pd, "--storage", storage, "--executor", "spark"]
    kafka = ["sync", "--pd", pd, "--sink", "kafka://127.0.0.1:1/topic", "--state-dir", f"{tmp_path}/state"]
    for arguments, code, package in (
        (spark, 50, "pyspark"),
        (kafka, 56, "confluent-kafka"),
        (["list", "s3://bucket/backups"], 56, "boto3"),
    ):
        last = run(program, *arguments, code=code)[-1]
        python = program.parent / "python"
        assert str(last["hint"]).startswith(f"Run: uv pip install --python {python} "), last
        assert package in str(last["hint"])
    versions = run(program, "version")[-1]["versions"]
    assert isinstance(versions, dict)
    assert versions["numba"] == versions["pyspark"] == "not installed"
    assert run(program, "check", "--pd", pd, "--storage", storage)[-1]["message_type"] != "exit_error"
    succeed("raw", "delete", "--pd", pd, "key")  # the other test counts rows
