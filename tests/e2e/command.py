"""``tikv-br`` as a user runs it: in a process and a folder of its own, with nothing of ours in its environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from tests.support.documented import assert_documented
from tests.support.program import PROGRAM, run_program

__all__ = ["PROGRAM", "QUICK", "Done", "environment", "succeed", "tikv_br"]

QUICK = {
    "TIKV_BR_EXECUTOR": "driver",
    "TIKV_BR_BACKUP_RAW_SAFE_INTERVAL": "0s",
    "TIKV_BR_DRILL_RUN_SAFE_INTERVAL": "0s",
    "TIKV_BR_DRILL_RUN_TARGET_STORES": "1",
    "TIKV_BR_SYNC_HOLD_BACK": "0s",
    "TIKV_BR_LOG_START_HOLD_BACK": "0s",
    "TIKV_BR_LOG_START_FLUSH_INTERVAL": "200ms",
}
"""Variables that make commands quick; a flag wins."""


@dataclass(frozen=True)
class Done:
    """An ended command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def last(self) -> dict[str, Any]:
        """Return the last JSON line on stdout."""
        return self.lines[-1]


def environment(**more: str) -> dict[str, str]:
    """Return the environment without settings of tikv-br, of clouds, of terminals and of Python's buffers."""
    settings = ("TIKV_BR_", "AWS_", "AZURE_", "GOOGLE_", "COLUMNS", "PYTHONUNBUFFERED")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return {**bare, "XDG_CONFIG_HOME": "/nowhere", "NO_COLOR": "1", "AWS_EC2_METADATA_DISABLED": "true", **more}


def tikv_br(*arguments: str, stdin: str | None = None, timeout: float = 300, forked: bool = True, **more: str) -> Done:
    """Run a command to its end; ``more`` goes into its environment. JSON lines must be as docs/cli-json.md says."""
    done = run_program(arguments, environment=environment(**more), stdin=stdin, timeout=timeout, forked=forked)
    ended = Done(done.returncode, done.stdout, done.stderr)
    if "json" in arguments or more.get("TIKV_BR_OUTPUT") == "json":
        assert_documented(arguments, ended.lines)
    return ended


def succeed(*arguments: str, stdin: str | None = None, timeout: float = 300, forked: bool = True, **more: str) -> Done:
    """Run a command that must exit 0."""
    done = tikv_br(*arguments, stdin=stdin, timeout=timeout, forked=forked, **more)
    assert done.code == 0, f"{arguments}: exit code {done.code}\n{done.out}\n{done.err}"
    return done
