"""Compiles kernels, with types that mypy can follow.

A C extension of the kernels, which `tikv_br.formats.precompile` makes, is taken where there is one for these sources, as in a release: numba
takes longer to import than to convert 100 MB of rows (docs/adr/0031-the-extension-first.md). Elsewhere numba compiles them at their first call.

Both compile for the least processor of the architecture, so that machine code may go to any other: kernels lose nothing by it, since they
move words of eight bytes (docs/adr/0020-kernels-compiled-ahead.md).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast, overload

import numpy as np

if "numba" not in sys.modules:  # it reads this when it is imported; otherwise it compiles for this machine's processor
    os.environ.setdefault("NUMBA_CPU_NAME", "generic")

_PACKAGE = Path(__file__).parent
COMPILED = _PACKAGE / "compiled"
"""Extensions that `tikv_br.formats.precompile` has made."""
_HARMLESS = {
    *("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"),
    *("NUMBA_WARNINGS", "NUMBA_DISABLE_PERFORMANCE_WARNINGS"),
}


def has_plain_settings() -> bool:
    """Return whether no environment variable changes the code that numba generates."""
    return all(
        not name.startswith("NUMBA_") or name in _HARMLESS or (name, value) == ("NUMBA_CPU_NAME", "generic")
        for name, value in os.environ.items()
    )


def extension_file() -> Path:
    """The place of the extension for these sources, this Python and this architecture."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {platform.machine()}".encode())
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{source.relative_to(_PACKAGE)}\0".encode() + source.read_bytes())
    return COMPILED / f"kernels_{digest.hexdigest()[:32]}{EXTENSION_SUFFIXES[0]}"


def extension_name(kernel: Callable[..., object]) -> str:
    """The name of a kernel in the extension."""
    return f"{kernel.__module__.removeprefix('tikv_br.formats.')}.{kernel.__name__}".replace(".", "__")


_HAS_NUMBA = importlib.util.find_spec("numba") is not None


def _load_extension() -> ModuleType | None:
    path = extension_file()
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    wants_numba = _HAS_NUMBA and not has_plain_settings()
    if wants_numba or not path.exists() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:  # made for a newer C library
        if _HAS_NUMBA:
            return None
        raise
    return module


EXTENSION = _load_extension()
"""The kernels that Python calls; None: there is none that runs here, or settings of numba ask for other code."""
USES_NUMBA = EXTENSION is None and _HAS_NUMBA
if USES_NUMBA:
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
    compiles for itself. Raises `ModuleNotFoundError` without numba and without the extension.
    """
    if not USES_NUMBA:
        return _compiled_ahead if function is None else _compiled_ahead(function)
    settings: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", **options}

    def compiler(kernel: Callable[P, R]) -> Callable[P, R]:
        try:
            return cast("Callable[P, R]", _prepared(numba.njit(**settings)(kernel)))
        except RuntimeError:  # numba finds no folder for its cache
            pass
        config: Any = numba.config
        if not config.CACHE_DIR:
            config.CACHE_DIR = _temporary_folder()
        try:
            return cast("Callable[P, R]", _prepared(numba.njit(**settings)(kernel)))
        except RuntimeError:  # nor is there one; or the kernel belongs to no file
            return cast("Callable[P, R]", numba.njit(**settings | {"cache": False})(kernel))

    return compiler if function is None else compiler(function)


def _prepared(dispatcher: Any) -> Any:  # noqa: ANN401 - numba has no types
    """Let the kernel run though its machine code cannot be kept, as on a full disk: numba would end its first call.

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


def _compiled_ahead(kernel: Callable[P, R]) -> Callable[P, R]:
    """The function of the extension. It has checked the types of arguments, and not that arrays are contiguous: numba would compile for others, too.

    What only kernels call is not in it, and stays as it is.
    """
    if EXTENSION is None:
        raise ModuleNotFoundError(
            f"this installation has no kernels for Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}, which numba would compile",
            name="numba",
        )
    function: Callable[P, R] | None = getattr(EXTENSION, extension_name(kernel), None)
    if function is None:
        return kernel

    @functools.wraps(kernel)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        for each in arguments:
            if isinstance(each, np.ndarray) and not each.flags.c_contiguous:
                raise TypeError(f"{kernel.__name__} takes contiguous arrays only")
        return function(*arguments, **named)

    return call


@functools.cache
def _temporary_folder() -> str:
    """Folder for machine code that only this user can write to, because it is run unchecked. Empty if there is none."""
    folder = _private_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder) if _is_private(folder) else ""


def _private_folder() -> Path:
    return Path(tempfile.gettempdir(), f"tikv-br-kernels-{os.getuid()}")


def _is_private(folder: Path) -> bool:
    """Return whether a directory belongs to this user and is accessible to nobody else."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
