"""Processes made to be killed: each is forked, in milliseconds, off one that has imported all that they need.

``python -m tests.support.forks MODULE…``: each line of stdin is a pickled function in hex. A child calls it; the child's pid is
written, and its exit code when it has ended (negative: by that signal).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Forks:
    """The process that forks, as a context manager."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, not in each fork; none of them may start a thread."""
        self._modules = modules
        self._running = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.support.forks", *self._modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_running()
        self._process.__exit__(exc_type, exc, trace)  # the end of its input is the end of it

    def _end_running(self) -> None:
        if self._running:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self._running, signal.SIGKILL)
            self.wait()

    def start(self, work: Callable[[], int]) -> int:
        """Have a child call what pickles and returns an exit code; the child's pid. One that a failed test has left is killed first."""
        self._end_running()
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(work).hex() + "\n")
        self._process.stdin.flush()
        self._running = self._number()
        return self._running

    def wait(self) -> int:
        """Return the exit code of the child."""
        code = self._number()
        self._running = 0
        return code

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def _serve() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.dup2(2, 1)
                code = pickle.loads(bytes.fromhex(line))()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
