"""Where the C functions lie that kernels may call: in the wheels that bring zstd and lz4, as those export them."""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from typing import Any

_COMPRESSION_LEVEL = 100  # ZSTD_c_compressionLevel, of the stable interface


@dataclass(frozen=True, slots=True)
class Zstd:
    """A context for compression by libzstd, one thread at a time."""

    compress: int
    """The address of ``ZSTD_compress2``."""
    context: int
    """The address of a ``ZSTD_CCtx`` with the level set."""
    owner: object
    """Frees the context when it is gone."""

    @classmethod
    def open(cls, level: int) -> Zstd | None:
        """A context; None where the library cannot be reached."""
        found = zstd()
        if found is None:
            return None
        ffi, lib = found
        context = ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
        if context == ffi.NULL or lib.ZSTD_isError(lib.ZSTD_CCtx_setParameter(context, _COMPRESSION_LEVEL, level)):
            return None
        function = ffi.addressof(lib, "ZSTD_compress2")
        return cls(int(ffi.cast("uintptr_t", function)), int(ffi.cast("uintptr_t", context)), context)


@functools.cache
def zstd() -> tuple[Any, Any] | None:
    """Zstandard's interface by cffi, which its wheel holds beside the one it uses by default."""
    try:
        module = importlib.import_module("zstandard._cffi")
        module.lib.ZSTD_compress2  # noqa: B018 - whether it is there
    except (ImportError, AttributeError):
        return None
    return module.ffi, module.lib


@functools.cache
def lz4_compress() -> int:
    """The address of ``LZ4_compress_default``; 0 where it cannot be reached."""
    try:
        library = ctypes.CDLL(importlib.import_module("lz4.block._block").__file__)
        return ctypes.cast(library.LZ4_compress_default, ctypes.c_void_p).value or 0
    except (ImportError, OSError, AttributeError):
        return 0
