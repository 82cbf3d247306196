"""The program as such: how quickly it answers, what it loads, how it ends."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.support.waiting import PATIENCE, eventually

HEAVY = ("numba", "pyarrow", "numpy", "grpc", "pyspark", "obstore", "boto3", "rich")


YARDSTICK = "sum(number * number for number in range(3_000_000))"
YARDSTICK_SECONDS = 0.22
"""CPU seconds on a slow machine."""


def test_help_is_quick() -> None:
    """``--help`` takes less than 0.4 s of CPU, which is its time on a machine that has nothing else to do; a slower one may take longer."""
    helps, yardsticks = [], []
    for _ in range(5):
        begin = cpu_seconds_of_children()
        succeed("--help", forked=False)
        between = cpu_seconds_of_children()
        subprocess.run([sys.executable, "-c", YARDSTICK], check=True, timeout=PATIENCE)
        helps.append(between - begin)
        yardsticks.append(cpu_seconds_of_children() - between)
    assert min(helps) < 0.4 * max(1, min(yardsticks) / YARDSTICK_SECONDS)


def cpu_seconds_of_children() -> float:
    """CPU seconds of all ended children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["raw", "put", "--help"],
        ["backup", "raw", "--help"],
        ["restore", "--help"],
        ["playground", "--help"],
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """No help of any command imports what only its work needs."""
    code = (
        "import sys; from tikv_br.cli.main import run; code = run(sys.argv[1:]);"
        f"loaded = [name for name in {HEAVY} if name in sys.modules];"
        "print(loaded, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


NOT_NEEDED = {*HEAVY, "pydantic", "multiprocessing", "zipfile", "importlib.metadata"} - {"grpc"}
"""What loads slowly, and no small command needs: the arguments, threads and requests of one do without."""


def test_small_commands_load_what_they_use(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """A read, a backup by stores and its restore into an empty cluster: most of their time is the import of modules, and the making of a dataclass takes as long as that of a small one."""
    source, target, place = playgrounds["v1"], playgrounds["v2"], f"local://{tmp_path}/backup"
    succeed("raw", "put", "--pd", source, "modules", "few")
    most = {
        ("raw", "get", "--pd", source, "modules", "--output", "json"): (430, 15),
        ("backup", "raw", "--pd", source, "-s", place, "--dst-api-version", "v2", "--engine", "store"): (480, 16),
        ("restore", "raw", "--pd", target, "-s", place): (505, 20),
    }
    code = (
        "import sys; from tikv_br.cli.main import run; code = run(sys.argv[1:]);"
        f"loaded = sorted({NOT_NEEDED} & set(sys.modules));"
        "classes = {each for module in [*sys.modules.values()] for each in vars(module).values() if isinstance(each, type)};"
        "made = sum('__dataclass_fields__' in vars(each) for each in classes);"
        "loaded += [name for name in sys.modules if name.endswith('_cmd')];"
        "print(code, len(sys.modules), made, *loaded, file=sys.stderr)"
    )
    for command, (limit, limit_of_dataclasses) in most.items():
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            env=environment(),
        )
        status, count, made, *loaded = done.stderr.splitlines()[-1].split()
        assert (status, loaded) == ("0", [f"tikv_br.cli.{command[0]}_cmd"]), command
        assert (int(count) <= limit, int(made) <= limit_of_dataclasses) == (True, True), (command, count, made)


def test_version_names_what_it_stands_on() -> None:
    """Versions of our own and of the packages that matter, for bug reports."""
    versions = succeed("version", "--output", "json", forked=False).last["versions"]
    assert {"tikv-br", "python", "pyspark", "pyarrow", "grpcio"} <= set(versions)
    assert succeed("--version", forked=False).out == f"tikv-br {versions['tikv-br']}\n"


def test_debug_shows_where_an_error_comes_from() -> None:
    """``--log-level debug`` adds the traceback that is otherwise spared."""
    arguments = ("raw", "get", "--pd", "127.0.0.1:1", "k")
    assert "Traceback" not in tikv_br(*arguments, forked=False).err
    assert "Traceback" in tikv_br(*arguments, "--log-level", "debug", forked=False).err


@pytest.fixture(scope="module")
def pd(playgrounds: Playgrounds) -> str:
    """Return a V1 cluster with enough pairs that a scan takes a moment."""
    succeed("raw", "import", "--pd", playgrounds["v1"], "--count", "20000", "--value-size", "1KiB")
    return playgrounds["v1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_with_their_codes(pd: str, number: signal.Signals, code: int) -> None:
    """A stopped command reports it and exits with 128 + the signal, in JSON form as well."""
    command = [str(PROGRAM), "raw", "import", "--pd", pd, "--output", "json", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write('{"key": "6b", "value": "76"}\n')
        process.stdin.flush()
        eventually(lambda: unread(process.stdin) == 0)  # it has begun, and waits for more
        process.send_signal(number)
        out, _ = process.communicate(timeout=PATIENCE)
    line = json.loads(out.splitlines()[-1])
    assert (process.returncode, line["message_type"], line["code"]) == (code, "exit_error", code)


def unread(pipe: IO[str] | None) -> int:
    """Number of unread bytes in a pipe."""
    assert pipe is not None
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def test_reader_that_stops_is_no_noise(pd: str) -> None:
    """``| head`` ends a scan quietly, with the code of SIGPIPE."""
    command = [str(PROGRAM), "raw", "scan", "--pd", pd, "--output", "json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE) == 141


def test_environment_stands_in_for_flags(pd: str) -> None:
    """``TIKV_BR_PD`` and ``TIKV_BR_OUTPUT`` are taken where the flags are not given."""
    done = tikv_br("raw", "scan", "--limit", "1", TIKV_BR_PD=pd, TIKV_BR_OUTPUT="json")
    assert list(done.last) == ["key", "value"]


@pytest.mark.parametrize(
    ("arguments", "streams", "code"),
    [
        ("version", ">&-", 0),
        ("version --output json", ">&-", 0),
        ("version", ">/dev/full", 54),
        ("version --output json", ">/dev/full", 54),
        ("show -s /there/is/no/such/folder", "2>&-", 31),
        ("show -s /there/is/no/such/folder", "2>/dev/full", 31),
    ],
)
def test_streams_that_are_closed_or_full(arguments: str, streams: str, code: int) -> None:
    """The exit code is that of the work; lost output has a code of its own, and never a traceback."""
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" {arguments} {streams}', str(PROGRAM)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("cannot write to standard output" in done.stderr) == (code == 54)
