"""What this process gets from its surroundings: the user's folders, and variables that others set."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tikv_br.errors import MachineUnfit, UsageError

CONFIG = "XDG_CONFIG_HOME"
STATE = "XDG_STATE_HOME"
_BELOW_HOME = {CONFIG: ".config", STATE: ".local/state"}
OPTIONAL_PACKAGES = {
    "boto3": "boto3>=1.34,<2",
    "botocore": "boto3>=1.34,<2",
    "confluent_kafka": "confluent-kafka>=2.6,<3",
    "llvmlite": "llvmlite>=0.43",
    "numba": "numba>=0.60,<0.69",
    "pandas": "pandas>=2.2,<3",
    "py4j": "pyspark>=4.0,<4.4",
    "pyspark": "pyspark>=4.0,<4.4",
    "rocksdict": "rocksdict>=0.3.23,<0.4",
}
"""Modules that not every installation has, and what installs them: the extras of pyproject.toml."""
_SERVICE = re.compile(r"TIKV_BR(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets in every container for a service whose name begins with tikv-br."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
"""Beginning of the value of its ``…_PORT``, which may have the name of a setting."""


def user_folder(variable: str) -> Path | None:
    """tikv-br's folder in one of the XDG base directories; None without the variable if this user has no home.

    As the XDG specification says, a relative path in the variable is ignored.
    """
    given = os.environ.get(variable, "")
    if Path(given).is_absolute():
        return Path(given, "tikv-br")
    try:
        home = Path.home()
    except RuntimeError:  # a user id without an entry in passwd, and no HOME
        return None
    return home / _BELOW_HOME[variable] / "tikv-br" if home.is_absolute() else None


def needed_user_folder(variable: str) -> Path:
    """As `user_folder`. Raises `UsageError` if there is none."""
    folder = user_folder(variable)
    if folder is None:
        raise UsageError(
            f"this user (id {os.getuid()}) has no home directory: HOME is not set to an absolute path",
            hint=f"Set HOME or {variable} to a directory that this user can write to, or pass the paths that the command needs.",
        )
    return folder


def drop_foreign_variables() -> list[str]:
    """Remove variables that are no settings of tikv-br, or that would end a library's import, or the process, without a message.

    Returns a sentence for each of the latter.
    """
    for name, value in list(os.environ.items()):
        if _SERVICE.fullmatch(name) or (name.startswith("TIKV_BR_") and _SERVICE_URL.match(value)):
            del os.environ[name]
    ignored = []
    for name, (is_harmless, why) in _FATAL.items():
        if name in os.environ and not is_harmless(os.environ[name]):
            ignored.append(f"the environment variable {name}={os.environ.pop(name)} was ignored: {why}")
    return ignored


def _is_positive(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit() and int(text) > 0


_STRATEGIES = frozenset({"all", "epoll1", "poll"})
_FATAL: dict[str, tuple[Callable[[str], bool], str]] = {
    "NUMBA_NUM_THREADS": (_is_positive, "it is not a number of threads"),
    "NUMBA_DISABLE_JIT": (lambda value: value.strip() in {"", "0"}, "tikv-br needs numba's compiler"),
    "GRPC_POLL_STRATEGY": (
        lambda value: set(value.split(",")) <= _STRATEGIES,
        f"gRPC knows only {', '.join(sorted(_STRATEGIES))}",
    ),
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": (
        lambda value: value in {"", "upb", "python"},
        "this protobuf has no such implementation",
    ),
}
"""Variables that libraries read at their import: whether a value works, and what is wrong with others."""


def is_installed(module: str) -> bool:
    """Whether one of `OPTIONAL_PACKAGES` can be imported. Imports nothing."""
    return importlib.util.find_spec(module) is not None


def install_hint(*modules: str) -> str:
    """The command that installs some of `OPTIONAL_PACKAGES` for this Python, from any index: it names no package of ours."""
    # Environments that uv has made have no pip.
    command = [sys.executable, "-m", "pip", "install"]
    if not is_installed("pip"):
        command = ["uv", "pip", "install", "--python", sys.executable]
    return f"Run: {shlex.join([*command, *(OPTIONAL_PACKAGES[each] for each in modules)])}"


def missing_package(module: str, purpose: str) -> MachineUnfit:
    """The error for a command that needs one of `OPTIONAL_PACKAGES`; `purpose` is its subject."""
    return MachineUnfit(f"{purpose} the package {module}, which is not installed", hint=install_hint(module))


def failure_of_machine(error: BaseException) -> MachineUnfit | None:
    """The error to report for an exception whose cause is this machine's packages, limits or folders; None for others."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        return missing_package(module, "this command requires") if module in OPTIONAL_PACKAGES else None
    number = error.errno if isinstance(error, OSError) else None
    found: tuple[str, str] | None = None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        found = (
            "there is not enough memory",
            "Raise the limit of this process (ulimit -v, or the limit of the container).",
        )
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        found = (
            "no more threads can be started",
            "Raise the limit of processes (ulimit -u, or the limit of the container).",
        )
    elif number in {errno.EMFILE, errno.ENFILE}:
        found = "too many files are open", "Raise the limit of open files: ulimit -n 4096."
    elif isinstance(error, OSError) and not has_current_folder():
        found = "the current directory was removed", "Change to one that exists, then run the command again."
    elif isinstance(error, OSError) and not has_temporary_folder():
        found = (
            "there is no directory for temporary files that this user can write to",
            "Set TMPDIR to one, or mount one at /tmp.",
        )
    elif isinstance(error, OSError) and error.filename is not None:
        found = f"{os.fsdecode(error.filename)}: {error.strerror}", "Check the path and its permissions."
    return None if found is None else MachineUnfit(found[0], hint=found[1])


def has_current_folder() -> bool:
    """Whether the current directory still exists."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def has_temporary_folder() -> bool:
    """Whether temporary files can be made."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return False
    return True
