"""Secrets vanish from the command line that others see; the program itself keeps them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tikv_br.cli.process_list import hide_arguments

SECRET = "603deb1015ca71be"
PROGRAM = """
import sys
from pathlib import Path
from tikv_br.redaction import secrets_in
from tikv_br.cli.process_list import hide_arguments
hide_arguments(secrets_in(" ".join(sys.argv)))
print(sys.argv[1:])
print(Path("/proc/self/cmdline").read_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the memory")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--crypter.key", SECRET, "--crypter.key-file", "name"],
        [f"--crypter.key={SECRET}", "--pd", "host:1"],
        ["--webhook-url", f"https://hooks.example.com/{SECRET}", "drill"],
        ["-s", f"s3://b/p?access-key=me&secret-access-key={SECRET}&region=eu", SECRET],
    ],
)
def test_stars_in_the_place_of_secrets(arguments: list[str]) -> None:
    """Every occurrence is overwritten, the rest is as it was, and so is what the program has read."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    own, visible = done.stdout.splitlines()
    assert own == str(arguments)
    assert SECRET not in visible
    assert "*" * len(SECRET) in visible
    assert arguments[-1].partition("?")[0].replace(SECRET, "*" * len(SECRET)) in visible


def test_without_secrets_nothing_is_touched() -> None:
    """The usual case, in this very process."""
    hide_arguments([])
