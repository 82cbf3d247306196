"""Calls from kernels to functions of C libraries, by addresses that are given at run time.

A compiled kernel therefore holds no address and may be cached on disk. Nothing is checked: a wrong address, or one of a
function with another signature, ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from formats.kernels.addresses import Codegen, Int

_INT, _SIZE = ir.IntType(32), ir.IntType(64)


def _caller(result: ir.IntType, parameters: list[ir.IntType]) -> Callable[[Any, Any], Any]:
    """Code that calls a function of this type: pointers are sizes, a C int is sign-extended."""

    def call(builder: Any, args: Any) -> Any:  # noqa: ANN401 - llvmlite's own objects
        function = builder.inttoptr(args[0], ir.FunctionType(result, parameters).as_pointer())
        given = [
            builder.trunc(argument, kind) if kind is _INT else argument
            for argument, kind in zip(args[1:], parameters, strict=True)
        ]
        return builder.sext(builder.call(function, given), _SIZE) if result is _INT else builder.call(function, given)

    return call


_CALL_SIZES = _caller(_SIZE, [_SIZE] * 5)
_CALL_INTS = _caller(_INT, [_SIZE, _SIZE, _INT, _INT])


def _sizes(_typing: Any, _function: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return _CALL_SIZES(builder, args)

    return types.int64(*[types.int64] * 6), codegen


def _ints(_typing: Any, _function: Any, _1: Any, _2: Any, _3: Any, _4: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return _CALL_INTS(builder, args)

    return types.int64(*[types.int64] * 5), codegen


call_sizes = cast("Callable[[Int, Int, Int, Int, Int, Int], Int]", intrinsic(_sizes))
"""``call_sizes(function, context, destination, room, source, size)``: ``size_t f(void *, void *, size_t, const void *, size_t)``."""
call_ints = cast("Callable[[Int, Int, Int, Int, Int], Int]", intrinsic(_ints))
"""``call_ints(function, source, destination, size, room)``: ``int f(const char *, char *, int, int)``."""
