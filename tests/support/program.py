"""The program for tests whose subject is not how a process starts: forked off one that has imported what commands need.

A command in a new process spends most of its processor time on imports. Here a process imports once; each command is a fork of it, with
arguments, environment, folder, input and outputs of its own.
``python -m tests.support.program SOCKET``: serves until the end of its stdin.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from tests.support.tools import ROOT

PROGRAM = Path(sys.executable).with_name("tikv-br")
_MAY_DIFFER = (
    "TIKV_BR_",
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "XDG_",
    "SPARK_",
    "PYTEST_",
    "PYTHONUNBUFFERED",
    "JAVA_HOME",
    "JAVA_TOOL_OPTIONS",
    "HOME",
    "PATH",
    "COLUMNS",
    "NO_COLOR",
)
"""Variables that are read when a command runs. Others, as Python's and numba's, are read by imports: with them no fork is made."""
_AS_KERNELS_SET = {"NUMBA_CPU_NAME": "generic"}
"""Default settings of `tikv_br.formats.jit`: in this process once a test has imported kernels, in a command always."""
_PACKAGES = (
    *("tikv_br.cli", "tikv_br.backup", "tikv_br.restore", "tikv_br.verify", "tikv_br.diff", "tikv_br.check"),
    *("tikv_br.export", "tikv_br.bulk_load", "tikv_br.load", "tikv_br.gc", "tikv_br.drill", "tikv_br.incremental"),
)


def run_program(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: str = "/",
    stdin: str | None = None,
    timeout: float = 300,
    forked: bool = True,
    on_start: Callable[[int], None] = lambda _pid: None,
) -> subprocess.CompletedProcess[str]:
    """Run ``tikv-br`` without a terminal to its end. Raises `subprocess.TimeoutExpired`, when the command has been killed.

    Without ``forked``, or with an environment that a fork would not see as it is, in a new process. ``on_start`` gets the pid of a fork.
    """
    command = [str(PROGRAM), *arguments]
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write((stdin or "").encode())
        given.seek(0)
        if forked and _zygote().serves(environment):
            code = _zygote().run(_Request(command, dict(environment), cwd), (given, out, err), timeout, on_start)
        else:
            code = subprocess.run(
                command, stdin=given, stdout=out, stderr=err, env=environment, cwd=cwd, timeout=timeout, check=False
            ).returncode
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")  # as pipes opened as text


@dataclass(frozen=True)
class _Request:
    command: list[str]
    environment: dict[str, str]
    cwd: str


class _Zygote:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._environment = _AS_KERNELS_SET | {
            name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
        }
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")
        self._path = str(Path(self._folder.name, "socket"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.program", self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=self._environment,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self._process.stdout.close()
        atexit.register(self.end)

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork sees of this environment what a new process would see."""
        differ = {name for name, _ in (_AS_KERNELS_SET | dict(environment)).items() ^ self._environment.items()}
        return all(name.startswith(_MAY_DIFFER) for name in differ)

    def run(
        self, request: _Request, files: tuple[IO[bytes], ...], timeout: float, on_start: Callable[[int], None]
    ) -> int:
        """Run a command and return its exit code, negative for a signal."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._path)
            text = json.dumps([request.command, request.environment, request.cwd]).encode()
            socket.send_fds(connection, [len(text).to_bytes(8, "big")], [file.fileno() for file in files])
            connection.sendall(text)
            answers = connection.makefile()
            pid = int(answers.readline())
            on_start(pid)
            connection.settimeout(timeout)
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(request.command, timeout) from None
            finally:
                answers.close()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


# ------------------------------------------------------------------------------------------------------ in that process


def _preload() -> None:
    """Import what commands import, compile their templates and load the kernels. Nothing here may start a thread."""
    importlib.import_module("tests.integration.crash.warm")
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)


def _serve(path: str) -> None:
    """Fork for each request."""
    _preload()
    gc.freeze()  # else each fork's first collection copies all pages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for commands
        while sys.stdin not in (readable := select.select([listener, sys.stdin], [], [])[0]):
            assert readable
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    """Fork a command, and say its pid and its exit code."""
    with connection:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as stream:
            command, environment, cwd = json.loads(stream.read(int.from_bytes(head, "big")))
        pid = os.fork()
        if pid:
            connection.sendall(b"%d\n" % pid)
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The objects of the process that forks: its standard input is a pipe, and knows that.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = command
    from tikv_br.cli import main

    code = main.run()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking all modules down costs more than most commands


if __name__ == "__main__":
    _serve(sys.argv[1])
