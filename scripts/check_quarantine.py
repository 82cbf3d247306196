#!/usr/bin/env python3
"""Check tests/quarantine.toml: the tests that may fail once and pass on a retry, each with a reason and an expiry date.

    scripts/check_quarantine.py                      no entry is malformed or expired
    scripts/check_quarantine.py --unsteady FILE      all tests in FILE (pytest's lastfailed, JSON) are quarantined

Exits with 1, and says what to do, if not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tests" / "quarantine.toml"
FIELDS = {"test": str, "reason": str, "expires": dt.date}


def read_entries(file: Path) -> list[dict[str, object]]:
    """Return the file's ``[[quarantined]]`` tables, unchecked."""
    entries: list[dict[str, object]] = tomllib.loads(file.read_text()).get("quarantined", [])
    return entries


def find_faults(entries: Iterable[dict[str, object]], today: dt.date) -> list[str]:
    """Return a message for each entry that is malformed or expired."""
    faults = []
    for entry in entries:
        wrong = [name for name, kind in FIELDS.items() if not isinstance(entry.get(name), kind) or not entry[name]]
        if wrong:
            faults.append(f"{entry.get('test', entry)}: {', '.join(wrong)} missing or of the wrong type")
        elif isinstance(entry["expires"], dt.date) and entry["expires"] < today:
            faults.append(f"{entry['test']}: expired on {entry['expires']}; fix the test, then remove the entry")
    return faults


def find_unlisted(unsteady: Iterable[str], entries: Iterable[dict[str, object]]) -> list[str]:
    """Return the tests that no entry names. An entry without ``[parameters]`` stands for all parameters of its test."""
    listed = {entry.get("test") for entry in entries}
    return [test for test in unsteady if not {test, test.partition("[")[0]} & listed]


def main(arguments: Sequence[str] | None = None, file: Path = FILE) -> int:
    """Check, print what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check the list of quarantined tests.")
    parser.add_argument("--unsteady", type=Path, help="JSON file whose keys are tests that passed only on a retry")
    asked = parser.parse_args(arguments)
    entries = read_entries(file)
    messages = [f"{file.name}: {fault}" for fault in find_faults(entries, dt.datetime.now(dt.UTC).date())]
    if asked.unsteady:
        unsteady = list(json.loads(asked.unsteady.read_text()))
        unlisted = find_unlisted(unsteady, entries)
        for test in unsteady:
            note = "fails the run: not quarantined" if test in unlisted else "quarantined"
            sys.stderr.write(f"==> UNSTEADY: {test} failed and passed on a retry ({note})\n")
        if unlisted:
            messages.append(
                "Some tests passed only on a retry. Fix the race, in the test or in what it tests. If that must wait, "
                f"add the test to tests/{file.name} with a reason and an expiry date."
            )
    for message in messages:
        sys.stderr.write(message + "\n")
    return 1 if messages else 0


if __name__ == "__main__":
    raise SystemExit(main())
