"""CRC32c by the processor's own instruction (SSE 4.2), where kernels are compiled for one that has it: see `available`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from formats.jit import njit
from formats.kernels.addresses import Codegen, Int, load, load_byte

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def available() -> bool:
    """Whether `crc32c` is a checksum: without the instruction it compiles, into nothing of use."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+sse4.2" in features.split(",")


def _word(_typing: Any, _crc: Any, _data: Any) -> tuple[Any, Codegen]:  # noqa: ANN401 - numba's own objects
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        if not available():
            return _I64(0)
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), kind), args)

    return types.uint64(types.uint64, types.uint64), codegen


def _byte(_typing: Any, _crc: Any, _data: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        if not available():
            return _I64(0)
        kind = ir.FunctionType(_I32, [_I32, _I8])
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.32.8", (), kind)
        return builder.zext(builder.call(step, [builder.trunc(args[0], _I32), args[1]]), _I64)

    return types.uint64(types.uint64, types.uint8), codegen


_crc_word = cast("Callable[[Int, Int], np.uint64]", intrinsic(_word))
_crc_byte = cast("Callable[[Int, Int], np.uint64]", intrinsic(_byte))


@njit(forceinline=True)
def crc32c(at: Int, size: Int) -> np.uint64:
    """The CRC of bytes at an address, as iSCSI has it."""
    crc = np.uint64(0xFFFFFFFF)
    stop = at + size
    while at + 8 <= stop:
        crc = _crc_word(crc, load(at))
        at += 8
    while at < stop:
        crc = _crc_byte(crc, load_byte(at))
        at += 1
    return crc ^ np.uint64(0xFFFFFFFF)
