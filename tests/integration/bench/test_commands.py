"""The bench of whole commands beside an earlier work tree, beside the Go tools, and on real servers; programs that are not at hand have stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment
from tests.support.tools import ROOT

TOO_LONG = 300
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TOO_LONG)]
SERVERS = ROOT / "tests" / "real" / "servers"
REAL = {"TIKV_BR_PD_SERVER": str(SERVERS / "pd-server"), "TIKV_BR_TIKV_SERVER": str(SERVERS / "tikv-server")}
OURS = {"whole command", "its processor time"}
OF_STORES = {"stores at work", "the command's own"}


def _bench(folder: Path, **variables: str) -> dict[str, set[str]]:
    """The subjects of each case."""
    path = folder / "figures.json"
    command = [sys.executable, "-m", "bench", "--tiny", "--only", "commands", "--json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=TOO_LONG, check=False, env=environment(**variables)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for figure in json.loads(path.read_text())["figures"]:
        assert figure["value"]["low"] > 0
        found.setdefault(figure["case"].rpartition(", ")[0], set()).add(figure["subject"])
    return found


def _tool(folder: Path) -> str:
    """A program that takes the flags of the Go tools that the bench passes: ours, which refuses others."""
    program = folder / "go-tool"
    program.write_text(f'#!/bin/sh\n[ "$1" = --output ] && exit 2\nexec "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_today_and_before_by_turns(tmp_path: Path) -> None:
    """Each command and step of both trees, beyond the time in which a playground's stores were at work."""
    found = _bench(tmp_path, TIKV_BR_BENCH_BEFORE=str(ROOT))
    assert set(found) == {"raw get", "backup, scan", "backup, store", "restore"}
    for case, subjects in found.items():
        today = {each for each in subjects if not each.startswith("before: ")}
        assert subjects - today == {f"before: {each}" for each in today}
        assert today >= OURS | OF_STORES
        expected = {"raw get": set(), "restore": {"step ingest", "step connect"}}.get(
            case, {"step copy", "step connect"}
        )
        assert {each for each in today if each.startswith("step ")} >= expected


def test_beside_the_go_tools_on_real_servers(tmp_path: Path) -> None:
    """Real servers do not say when they are at work; each Go tool does what it can, without steps."""
    tool = _tool(tmp_path)
    found = _bench(tmp_path, **REAL, TIKV_BR_GO_TOOL=tool, TIKV_BR_BR_TOOL=tool)
    rivals = {"backup, store": "Go TiKV-BR", "restore": "Go TiKV-BR", "backup txn": "BR"}
    assert set(found) == {"raw get", "backup, scan", *rivals}
    for case, subjects in found.items():
        assert subjects >= OURS
        assert not subjects & OF_STORES
        name = rivals.get(case)
        theirs = {each for each in subjects if ": " in each}
        assert theirs == ({f"{name}: {each}" for each in OURS} if name else set())
