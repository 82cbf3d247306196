"""A plan of many regions stays small and quick on the driver, and no task or worker is sent more than its own interval."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tools import ROOT

TOO_LONG = 120


def planned(regions: int) -> dict[str, Any]:
    """Return what planning took, against a PD that knows so many regions; both are processes of their own."""
    server = [sys.executable, "-m", "tests.integration.scale.pd_with_regions", str(regions)]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as pd:
        try:
            assert pd.stdout is not None
            addresses = pd.stdout.readline().split()
            planner = [sys.executable, "-m", "tests.integration.scale.plan_once", *addresses]
            result = subprocess.run(planner, capture_output=True, text=True, cwd=ROOT, timeout=TOO_LONG, check=False)
        finally:
            pd.kill()
    assert result.returncode == 0, result.stderr
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Return those of 10,000 regions."""
    return planned(10_000)


def test_ten_thousand_regions_are_planned_in_seconds(figures: dict[str, Any]) -> None:
    """Asking PD for 10,000 regions and their sizes, and cutting them into tasks, takes below 5 s and 300 MiB."""
    assert figures["regions"] == 10_000
    assert figures["tasks"] == 1_000
    assert figures["cpu_seconds"] < 5
    assert figures["peak_mib"] < 300


def test_tasks_are_sent_their_interval_only(figures: dict[str, Any]) -> None:
    """What a task is, and what all workers share, does not grow with the number of regions."""
    few = planned(100)
    assert figures["task_bytes"] < 300
    assert abs(figures["closure_bytes"] - few["closure_bytes"]) < 50
    assert figures["closure_bytes"] < 20_000
