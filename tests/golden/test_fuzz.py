"""Damaged files and messages of real servers: bounded runs of scripts/fuzz.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzzing import run
from tests.fuzzing.child import TARGETS
from tests.fuzzing.run import main


@pytest.mark.parametrize(
    ("target", "inputs", "processes"), [("sst", 1000, 2), ("page", 2000, 1), ("cdc", 5000, 1), ("write", 5000, 1)]
)
def test_a_bounded_run_finds_nothing(
    target: str,
    inputs: int,
    processes: int,
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of damaged inputs, recorded ones among them, read by processes of their own, end as they should."""
    monkeypatch.setattr(run, "BATCH", inputs // processes)
    asked = ["--target", target, "--inputs", str(inputs), "--seed", "7"]
    assert main([*asked, "--golden", str(golden), "--keep", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.match(rf"{inputs} inputs of (\d+) {target}, seeds 7 to {6 + processes},", last)
    assert found is not None, last
    assert int(found[1]) > len(TARGETS[target].recorded(golden)) > 0
    assert list(tmp_path.iterdir()) == []
