"""Compiles kernels, with types that mypy can follow."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, overload

import numba

P = ParamSpec("P")
R = TypeVar("R")


@overload
def njit(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def njit(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...  # noqa: ANN401 - numba's own options
def njit(function: Callable[P, R] | None = None, /, **options: Any) -> Any:
    """Compile with numba on the first call: machine code is cached on disk and runs without the GIL.

    Use it bare (``@njit``) or with options of ``numba.njit``. Division by zero follows numpy, so that integer division
    costs no check; indexing is NOT checked, so a kernel must prove every index before it uses one.

    The cache follows the file that defines the kernel, not the files of kernels it calls: after a change to a shared
    kernel, remove ``__pycache__``. Where neither that nor the user's cache folder can be written, as on executors of a
    cluster, a folder below the temporary one is taken: a machine compiles once, not every worker. Without any, each process
    compiles for itself.
    """
    settings: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", **options}

    def compiler(kernel: Callable[P, R]) -> Callable[P, R]:
        try:
            return cast("Callable[P, R]", _forgiving(numba.njit(**settings)(kernel)))
        except RuntimeError:  # numba finds no folder for its cache
            pass
        config: Any = numba.config
        if not config.CACHE_DIR:
            config.CACHE_DIR = _temporary_folder()
        try:
            return cast("Callable[P, R]", _forgiving(numba.njit(**settings)(kernel)))
        except RuntimeError:  # nor is there one; or the kernel belongs to no file
            return cast("Callable[P, R]", numba.njit(**settings | {"cache": False})(kernel))

    return compiler if function is None else compiler(function)


def _forgiving(dispatcher: Any) -> Any:  # noqa: ANN401 - numba has no types
    """Let a kernel run though its machine code cannot be kept, as on a full disk: numba would end its first call.

    Where the code lies below the temporary folder, whether that is ours alone is asked each time: somebody may have removed
    it, and another user created it again, after this process started.
    """
    cache = dispatcher._cache  # noqa: SLF001 - there is no other way to it
    if cache.cache_path is None:  # as was asked for
        return dispatcher
    load, save, folder = cache.load_overload, cache.save_overload, Path(cache.cache_path)

    def is_safe() -> bool:
        try:
            shared = _private_folder()
        except FileNotFoundError:  # a disk so full that Python finds no temporary directory
            return False
        return shared not in folder.parents or _is_private(shared)

    def load_overload(signature: object, context: object) -> object:
        return load(signature, context) if is_safe() else None

    def save_overload(signature: object, data: object) -> None:
        with suppress(OSError):
            if is_safe():
                save(signature, data)

    cache.load_overload, cache.save_overload = load_overload, save_overload
    return dispatcher


@functools.cache
def _temporary_folder() -> str:
    """A folder for machine code that nobody else can write to: it is run as it is found. Empty where there is none."""
    folder = _private_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder) if _is_private(folder) else ""


def _private_folder() -> Path:
    return Path(tempfile.gettempdir(), f"tikv-br-kernels-{os.getuid()}")


def _is_private(folder: Path) -> bool:
    """Whether it is a directory of this user's, which nobody else can reach into."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
