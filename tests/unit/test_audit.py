"""Verdict of the audit of dependencies on pip-audit's output."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "audit_dependencies.py"))
CLEAN = {"name": "good", "version": "1.0", "vulns": []}
SKIPPED = {"name": "unknown", "skip_reason": "not found"}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}


@pytest.mark.parametrize(
    ("packages", "said", "code"),
    [
        ([CLEAN, SKIPPED], "1 of 2 packages looked up, no known vulnerability", 0),
        ([CLEAN, BAD], "bad 2.0: PYSEC-1, fixed in 2.1", 1),
        ([SKIPPED], "nothing is known", 0),
        ([], "nothing is known", 0),
    ],
)
def test_verdict(packages: list[dict[str, Any]], said: str, code: int) -> None:
    """A known vulnerability fails it; an audit without answers is no success."""
    lines, ended = SCRIPT["report"](packages)
    assert said in "\n".join(lines)
    assert ended == code
    _, where_expected = SCRIPT["report"](packages, required=True)
    assert where_expected == (1 if "nothing" in said else code)
