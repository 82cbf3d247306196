"""Functions for a Spark worker that may lack tikv-br. Pickled by value, so they must not need tikv-br.

Functions import what they use, and raise or return built-in types only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MARK = "tikv-br-worker-unfit:"
"""Begins the text of the error of a worker that cannot run tasks; host and problem follow, in quotes, then `MARK` again."""


def problem_of_worker(version: str, modules: Iterable[str]) -> str:
    """Return why this process cannot run tasks of this version of tikv-br with these modules; ``""`` if it can."""
    import importlib

    try:
        found = importlib.import_module("tikv_br").__version__
    except ImportError as error:
        return f"no tikv-br ({error}), this machine has {version}"
    if found != version:
        return f"tikv-br {found}, this machine has {version}"
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"tikv-br {found} without a package that it needs ({error})"
    return ""


def examine_workers(version: str, modules: Iterable[str], rows: Iterable[object]) -> Iterator[tuple[str, str]]:
    """Yield host and problem of the worker for each row; the pause lets the other workers take rows as well."""
    import socket
    import time

    for _ in rows:
        yield socket.gethostname(), problem_of_worker(version, modules)
        time.sleep(0.1)


def run_function(version: str, function: bytes, rows: Iterable[object]) -> Iterator[object]:
    """Yield the pickled function's results for the rows. Raises `RuntimeError` with `MARK` if it cannot run here."""
    import pickle
    import socket

    problem = problem_of_worker(version, ())
    if problem:
        raise RuntimeError(f"{MARK}{socket.gethostname()}|{problem}{MARK}")
    try:
        made = pickle.loads(function)  # noqa: S301 - comes in the closure of the job
    except ImportError as error:
        problem = f"tikv-br {version} without a module that it needs ({error})"
        raise RuntimeError(f"{MARK}{socket.gethostname()}|{problem}{MARK}") from error
    yield from made(rows)
