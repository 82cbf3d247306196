"""Plans a backup of many regions, with PD and planner in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.tools import ROOT

TOO_LONG = 1200


def planned(regions: int, program: str = "plan_once", *arguments: str) -> dict[str, Any]:
    """Return what planning took, against a PD that knows so many regions; both are processes of their own.

    ``program`` is ``plan_once`` for the plan of a backup, ``back_up_once`` (with a folder) for plan and commit, ``plan_restore_once`` for
    the plan of a restore.
    """
    server = [sys.executable, "-m", "tests.integration.scale.pd_with_regions", str(regions)]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as pd:
        try:
            assert pd.stdout is not None
            addresses = pd.stdout.readline().split()
            planner = [sys.executable, "-m", f"tests.integration.scale.{program}", *addresses, *arguments]
            result = subprocess.run(planner, capture_output=True, text=True, cwd=ROOT, timeout=TOO_LONG, check=False)
        finally:
            pd.kill()
    assert result.returncode == 0, result.stderr
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures
