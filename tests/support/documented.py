"""docs/cli-json.md as a judge of what commands write: every line's type and fields must stand in its tables."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli-json.md"
IN_EVERY_LINE = {"message_type", "schema_version", "run_id"}
ROWS = {"key", "value", "expire_ts"}  # of `raw scan`


@functools.cache
def tables() -> dict[tuple[str, str], set[str]]:
    """The fields by command (or "any that fails", "with progress") and message type."""
    found = {}
    for command, kind, fields in re.findall(r"^\| (.+?) \| `(\w+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE):
        found[command.strip("`"), kind] = set(re.findall(r"`(\w+)`", fields))
    return found


def assert_documented(arguments: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    """Fail on a line whose type, or one of whose fields, the page does not name for the command of ``arguments``."""
    words = [argument for argument in arguments[:2] if not argument.startswith("-")]
    commands = [" ".join(words), *words[:1], f"{(*words, '')[0]} raw", "with progress", "any that fails"]
    for line in lines:
        if "message_type" not in line:
            assert words == ["raw", "scan"], line
            assert line.keys() <= ROWS, line
            continue
        kind = line["message_type"]
        known = next((tables()[command, kind] for command in commands if (command, kind) in tables()), None)
        assert known is not None, f"docs/cli-json.md has no {kind!r} of {words}"
        assert IN_EVERY_LINE <= line.keys() <= known | IN_EVERY_LINE, (kind, line.keys() - known - IN_EVERY_LINE)
        assert line["schema_version"] == 2
    if words not in (
        ["raw", "scan"],
        ["drill", "run"],
    ):  # the duration of a drill is in its report, which is written afterwards
        assert_total_has_all_steps(lines)


def assert_total_has_all_steps(lines: Sequence[dict[str, Any]]) -> None:
    """Fail if the seconds of a summary, which people see as total-take, are fewer than those of all steps together.

    Also of steps that other operations have made for it, as the merge of a restore to a time; but not of steps within steps.
    """
    if not lines or lines[-1]["message_type"] != "summary" or "seconds" not in lines[-1]:
        return
    depth, took = 0, [0.0]
    for line in lines:
        if line["message_type"] == "summary" and line is not lines[-1]:  # of another backup that `verify` looked at
            took = [0.0]
        if line["message_type"] == "step":
            depth += 1 if line["state"] == "started" else -1
            if line["state"] == "finished" and not depth:
                took.append(line["seconds"])
    assert sum(took) <= lines[-1]["seconds"] + 0.001 * len(took), (sum(took), lines[-1])  # each is rounded


def checked(arguments: Sequence[str], done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return an ended command, once its JSON lines, if it was to write such, have been found as documented."""
    if "json" in arguments:
        assert_documented(arguments, [json.loads(line) for line in done.stdout.splitlines()])
    return done
