"""One way to compile a kernel, with types that mypy can follow."""

from __future__ import annotations

from collections.abc import Callable
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
    kernel, remove ``__pycache__``. Where nothing can be cached (no writable folder) each process compiles for itself.
    """
    settings: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", **options}

    def compiler(kernel: Callable[P, R]) -> Callable[P, R]:
        try:
            return cast("Callable[P, R]", numba.njit(**settings)(kernel))
        except RuntimeError:  # numba finds no folder for its cache
            return cast("Callable[P, R]", numba.njit(**settings | {"cache": False})(kernel))

    return compiler if function is None else compiler(function)
