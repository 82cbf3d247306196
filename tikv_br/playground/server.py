"""The process of a playground: ``python -m tikv_br.playground.server DIR`` runs what DIR's settings say until told to end.

SIGTERM and SIGINT end it in order; after a SIGKILL the next start finds all data and the same ports.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from tikv_br.errors import PlaygroundError
from tikv_br.playground.cluster import Playground
from tikv_br.playground.home import Home
from tikv_br.playground.settings import SETTINGS_FILE, Settings

WAKE_SECONDS = 0.5
"""A signal that comes while the process is stopped (Ctrl-Z) may reach a thread of gRPC: nothing wakes the main one then, which acts on it."""
_log = logging.getLogger(__name__)


def run(home: Home) -> None:
    """Run the playground of a folder until SIGTERM or SIGINT. Raises `PlaygroundError` when it cannot start."""
    over = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with home.locked():
        settings = Settings.from_json((home.directory / SETTINGS_FILE).read_text())
        playground = Playground(settings)
        try:
            playground.start()
            home.register()
            home.write_state({**playground.describe(), "pid": os.getpid()})
            _log.info("ready: PD at %s", playground.state.address)
            while not over.wait(WAKE_SECONDS):
                pass
            home.unregister()
        finally:
            playground.stop()
    _log.info("ended")


def main(arguments: list[str]) -> int:
    """Run as a process; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(Home(Path(arguments[0])))
    except PlaygroundError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
