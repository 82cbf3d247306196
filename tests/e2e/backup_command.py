"""``tikv-br backup raw`` in a process of its own, with its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.documented import checked
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.program import run_program
from tikv_br.errors import TikvBrError
from tikv_br.formats.api_version import ApiVersion

TIKV_BR = [sys.executable, "-m", "tikv_br.cli.main"]
ROWS = 2000


@contextmanager
def noisy_cluster(folder: Path) -> Iterator[LiveCluster]:
    """Run a V1 cluster with rows whose values do not compress."""
    with live_cluster(folder, ApiVersion.V1, stores=3) as cluster:
        cluster.raw().batch_put({b"key%05d" % number: os.urandom(500) for number in range(ROWS)})
        cluster.split(b"key01000")
        yield cluster


def run(
    *arguments: str, environment: dict[str, str] | None = None, within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; `within` is a command that starts it."""
    settings, words = {**os.environ, **(environment or {})}, ["backup", "raw", *arguments]
    if within:
        done = subprocess.run(
            [*within, *TIKV_BR, *words], capture_output=True, text=True, timeout=300, env=settings, check=False
        )
    else:
        done = run_program(words, environment=settings)
    return checked(words, done)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the JSON lines on stdout."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def files_at(place: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def check_refusal(done: subprocess.CompletedProcess[str], error: type[TikvBrError]) -> dict[str, Any]:
    """Check that a run with ``--output json`` ended with this error, in its exit code and in its last line."""
    assert done.returncode == error.exit_code, done.stdout + done.stderr
    last = lines(done)[-1]
    assert (last["message_type"], last["code"], last["name"]) == ("exit_error", error.exit_code, error.__name__)
    assert last["message"]
    assert last["hint"]
    assert "Traceback" not in done.stderr
    return last
