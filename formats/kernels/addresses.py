"""Raw memory inside kernels: what numpy indexing cannot say in one machine instruction or one memcpy.

Addresses are plain integers. Nothing here checks anything: the kernel proves every range before it touches it.
A change here needs the callers' caches cleared (numba follows the file of the kernel only).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tikv_br.formats.jit import USES_NUMBA, njit

if USES_NUMBA:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic as _intrinsic

    _I64 = ir.IntType(64)
    _BYTE_POINTER = ir.IntType(8).as_pointer()
# Otherwise nothing is compiled, and only kernels call what is here.
intrinsic: Any = _intrinsic if USES_NUMBA else lambda function: function

Codegen = Callable[[Any, Any, Any, Any], Any]
Int = int | np.integer[Any]
"""A number inside a kernel, where all integers have 64 bits."""


def _address(_typing: Any, array: Any) -> tuple[Any, Codegen]:  # noqa: ANN401 - numba's own objects
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(view.data, _I64)

    return types.int64(array), codegen


def _copy(_typing: Any, _destination: Any, _source: Any, _count: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        destination, source = (builder.inttoptr(address, _BYTE_POINTER) for address in args[:2])
        cgutils.raw_memcpy(builder, destination, source, args[2], 1)  # type: ignore[no-untyped-call]

    return types.void(types.int64, types.int64, types.int64), codegen


def _load(_typing: Any, _address: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.uint64(types.int64), codegen


def _load_byte(_typing: Any, _address: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return builder.load(builder.inttoptr(args[0], _BYTE_POINTER))

    return types.uint8(types.int64), codegen


def _store_byte(_typing: Any, _address: Any, _byte: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        builder.store(args[1], builder.inttoptr(args[0], _BYTE_POINTER))

    return types.void(types.int64, types.uint8), codegen


def _store(_typing: Any, _address: Any, _word: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.void(types.int64, types.uint64), codegen


def _load_item(_typing: Any, _array: Any, _index: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return builder.load(builder.gep(builder.inttoptr(args[0], _I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), codegen


def _store_item(_typing: Any, _array: Any, _index: Any, _item: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], _I64.as_pointer()), [args[1]]))

    return types.void(types.int64, types.int64, types.int64), codegen


def _trailing_zeros(_typing: Any, _word: Any) -> tuple[Any, Codegen]:  # noqa: ANN401
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


address = cast("Callable[[npt.NDArray[np.generic]], int]", intrinsic(_address))
"""Address of a contiguous array's first element."""
copy = cast("Callable[[Int, Int, Int], None]", intrinsic(_copy))
"""``copy(destination, source, count)``: bytes that do not overlap."""
load = cast("Callable[[Int], np.uint64]", intrinsic(_load))
"""The little-endian uint64 at an address, aligned or not."""
load_byte = cast("Callable[[Int], np.uint8]", intrinsic(_load_byte))
"""The byte at an address."""
store = cast("Callable[[Int, Int], None]", intrinsic(_store))
"""``store(address, word)``: write a uint64, little endian, aligned or not."""
store_byte = cast("Callable[[Int, Int], None]", intrinsic(_store_byte))
"""Intrinsic ``store_byte(address, byte)``."""
load_item = cast("Callable[[Int, int], Int]", intrinsic(_load_item))
"""``load_item(array, index)``: an item of an array of int64 at an address."""
store_item = cast("Callable[[Int, int, Int], None]", intrinsic(_store_item))
"""``store_item(array, index, item)``. Kernels for this and `load_item` would be compiled once for each constant index."""
trailing_zeros = cast("Callable[[Int], int]", intrinsic(_trailing_zeros))
"""Number of low zero bits of a uint64; 64 for zero."""


@njit(forceinline=True)
def copy_words(destination: Int, source: Int, count: Int) -> None:
    """Copy a few bytes, for less than a call of memcpy; up to 7 beyond them are read and overwritten."""
    for at in range(0, count, 8):
        store(destination + at, load(source + at))


@njit(forceinline=True)
def xor(folded: Int, source: Int, count: Int) -> None:
    """XOR bytes into others."""
    at = np.int64(0)
    while at + 8 <= count:
        store(folded + at, load(folded + at) ^ load(source + at))
        at += 8
    while at < count:
        store_byte(folded + at, load_byte(folded + at) ^ load_byte(source + at))
        at += 1


@njit(forceinline=True)
def copy_xor(destination: Int, folded: Int, source: Int, count: Int) -> None:
    """Copy bytes, and XOR them into others at the same time; the three places do not overlap."""
    at = np.int64(0)
    while at + 32 <= count:  # written so that these become wide moves
        one, two, three, four = load(source + at), load(source + at + 8), load(source + at + 16), load(source + at + 24)
        store(destination + at, one)
        store(destination + at + 8, two)
        store(destination + at + 16, three)
        store(destination + at + 24, four)
        one, two = one ^ load(folded + at), two ^ load(folded + at + 8)
        three, four = three ^ load(folded + at + 16), four ^ load(folded + at + 24)
        store(folded + at, one)
        store(folded + at + 8, two)
        store(folded + at + 16, three)
        store(folded + at + 24, four)
        at += 32
    while at + 8 <= count:
        word = load(source + at)
        store(destination + at, word)
        store(folded + at, load(folded + at) ^ word)
        at += 8
    while at < count:
        byte = load_byte(source + at)
        store_byte(destination + at, byte)
        store_byte(folded + at, load_byte(folded + at) ^ byte)
        at += 1


@njit(forceinline=True)
def common_prefix(left: Int, right: Int, limit: Int) -> Int:
    """Return the number of equal bytes at two addresses, at most `limit`; both must have that many."""
    at = np.int64(0)
    while at + 8 <= limit:
        difference = load(left + at) ^ load(right + at)
        if difference:
            return at + (trailing_zeros(difference) >> 3)
        at += 8
    while at < limit and load_byte(left + at) == load_byte(right + at):
        at += 1
    return at


@njit(forceinline=True)
def varint_size(number: Int) -> Int:
    """Bytes that `put_varint` writes."""
    size = np.int64(1)
    while number >= 0x80:
        number >>= 7
        size += 1
    return size


@njit(forceinline=True)
def put_varint(at: Int, number: Int) -> Int:
    """Write a varint; the address after it."""
    while number >= 0x80:
        store_byte(at, number & 0x7F | 0x80)
        number >>= 7
        at += 1
    store_byte(at, number)
    return at + 1
