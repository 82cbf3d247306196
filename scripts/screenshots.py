#!/usr/bin/env python3
"""Make the screenshots of the documentation, in headless Chromium, from commands that run on a playground: ``screenshots.py [DIR]``.

Writes docs/images/{report,serve}.png, or into DIR. Takes about two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.browser import Page, browser  # noqa: E402 - the path is set before
from tests.support.live_cluster import LiveCluster, live_cluster  # noqa: E402
from tests.support.ports import reserved_ports  # noqa: E402
from tests.support.waiting import eventually  # noqa: E402
from tikv_br.formats.api_version import ApiVersion  # noqa: E402

PROGRAM = ROOT / ".venv/bin/tikv-br"
SECONDS_OF_WRITES = 40.0
WIDTH = 1100


def tikv_br(*arguments: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run([PROGRAM, *arguments, "--quiet"], check=True, stdin=subprocess.DEVNULL)


@contextmanager
def running(*arguments: str) -> Iterator[None]:
    """A command that runs until the end of the block."""
    with subprocess.Popen([PROGRAM, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def take(page: Page, url: str, target: Path) -> None:
    """Save a picture of the whole page."""
    page.colour_scheme("light")
    page.size(WIDTH, 700)
    page.go(url)
    page.size(WIDTH, min(int(page.value("document.documentElement.scrollHeight")), 1400))
    target.write_bytes(page.picture())
    sys.stderr.write(f"{target}\n")


def write(source: LiveCluster) -> None:
    """Rows for a while, so that the sync has something to show."""
    raw, until, number = source.raw(), time.monotonic() + SECONDS_OF_WRITES, 0
    while time.monotonic() < until:
        number += 1
        raw.batch_put({b"user%06d" % (number * 50 + each): os.urandom(50) for each in range(50 + number % 40)})
        time.sleep(0.05)


def main() -> None:
    """Make all of them."""
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    images.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        live_cluster(Path(name, "source"), ApiVersion.V2, stores=3, regions=6) as source,
        reserved_ports(2) as (status, overview),
        browser() as page,
    ):
        folder = Path(name)
        source.raw().batch_put({b"user%06d" % number: b"profile %d" % number * 10 for number in range(20_000)})
        where = ["--pd", source.pd, "--safe-interval", "0s"]
        full, increment = folder / "backups/2026-11-22", folder / "backups/2026-11-23"
        tikv_br("backup", "raw", *where, "-s", str(full), "--report", str(folder / "report.html"))
        take(page, (folder / "report.html").as_uri(), images / "report.png")
        follow = ["sync", "--pd", source.pd, "--sink", "blackhole://", "--from-backup", str(full), "--no-status-key"]
        with running(*follow, "--state-dir", str(folder / "state"), "--status-addr", str(status)):
            write(source)
            tikv_br("backup", "raw", *where, "-s", str(increment), "--base", str(full))
            shown = ["--storage", str(folder / "backups"), "--status", f"127.0.0.1:{status}", "--pd", source.pd]
            with running("serve", *shown, "--listen", str(overview)):
                url = f"http://127.0.0.1:{overview}/"
                eventually(
                    lambda: subprocess.run(["curl", "-sfo", "/dev/null", f"{url}healthz"], check=False).returncode == 0
                )
                take(page, url, images / "serve.png")


if __name__ == "__main__":
    main()
