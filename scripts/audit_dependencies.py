#!/usr/bin/env python3
"""Ask the advisory service of the package index about every version in constraints.txt: ``audit_dependencies.py``.

Exit code 1 when one of them has a known vulnerability that `ACCEPTED` does not name. Where the service cannot be reached (an index
of one's own has none) that is said, and nothing is known; with AUDIT_REQUIRED=1, as in CI, that is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
ACCEPTED: dict[str, str] = {}
"""Advisories that do not concern us, by id, each with the reason."""
PATIENCE_SECONDS = 180


def audited() -> list[dict[str, Any]]:
    """Result of pip-audit for each package: ``name``, ``version``, ``vulns``; or ``skip_reason``."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    options = ["--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=PATIENCE_SECONDS
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    return found


def report(packages: list[dict[str, Any]], *, required: bool = False) -> tuple[list[str], int]:
    """Lines to print, and the exit code. `required`: a service is expected."""
    known = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in known
        for found in package["vulns"]
        if found["id"] not in ACCEPTED
    ]
    if lines:
        return lines, 1
    if not known:
        return ["dependency audit: no advisory service was reached, so nothing is known"], int(required)
    return [f"dependency audit: {len(known)} of {len(packages)} packages looked up, no known vulnerability"], 0


def main() -> int:
    """Ask, print, and judge."""
    try:
        packages = audited()
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        packages = []  # as without the service
    lines, code = report(packages, required=os.environ.get("AUDIT_REQUIRED") == "1")
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
