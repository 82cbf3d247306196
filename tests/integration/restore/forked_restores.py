"""Restores in processes made to be killed: ``python -m tests.integration.restore.forked_restores``.

Each line of stdin is a pickled `RestoreOptions` in hex. A child is forked for it, which costs milliseconds where a fresh
interpreter costs a second; its pid is written, and its exit code when it has ended (negative: by that signal).
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from types import TracebackType
from typing import Self

from tikv_br.errors import TikvBrError
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore


class Forks:
    """The process that forks, as a context manager."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.integration.restore.forked_restores"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(exc_type, exc, trace)  # the end of its input is the end of it

    def start(self, options: RestoreOptions) -> int:
        """Begin a restore and return its pid; `wait` before the next one."""
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(options).hex() + "\n")
        self._process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """Return the exit code of the restore."""
        return self._number()

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def _run(options: RestoreOptions) -> int:
    try:
        restore(options)
    except TikvBrError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        return error.exit_code
    return 0


def _serve() -> None:
    for name in ("cluster.cluster", "cluster.scan", "proof.stored_rows", "storage.local"):
        importlib.import_module(f"tikv_br.{name}")  # once, not in each fork
    importlib.import_module("formats.rawscan")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = _run(pickle.loads(bytes.fromhex(line)))
            finally:
                sys.stderr.flush()
                os._exit(code)
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
