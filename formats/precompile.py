"""Compiles all kernels ahead of their first use: ``python -m tikv_br.formats.precompile``.

It makes a C extension of them, with the types that they are called with, in the folder `tikv_br.formats.jit.COMPILED`. A wheel that is built
afterwards contains it. That needs compilers of C and C++, Python's headers, setuptools and numba. Where it cannot be made, numba's cache is
filled instead, unless ``--extension`` demands it.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from tikv_br.formats import cdc, checksum, columns, jit, mvcc, rawscan
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY

_MODULES = (
    "kernels.cdc",
    "kernels.checksum",
    "kernels.order",
    "kernels.mvcc",
    "kernels.rawput",
    "kernels.rawscan",
    "kernels.rows",
    "sst.encode",
    "sst.reader",
    "sst.row_check",
)
_PAGE = b"\x12\x0a\x12\x03key\x1a\x03one"
"""A serialized ``kvrpcpb.RawScanResponse`` of one pair."""


def precompile() -> bool:
    """Make the extension, unless that was done for these sources; whether it was necessary.

    It has each kernel with the types with which Python calls it, by numba's compiler of extensions. Kernels take tuples for named ones, whose
    classes it does not know. Only for a process of its own: it changes numba's cache. Raises what numba and the compilers raise.
    """
    target = jit.extension_file()
    if target.exists() and jit.EXTENSION is not None:
        return False
    from numba import config  # after `tikv_br.formats.jit`, which chooses the processor

    jit.COMPILED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=jit.COMPILED) as folder:
        settings: Any = config
        # Numba's own cache follows the file of a kernel, not the files of the kernels that it calls.
        settings.CACHE_DIR = str(Path(folder, "cache"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba intends to replace this compiler by another one
            types, compiler, pycc = (
                cast("Any", importlib.import_module(f"numba.{name}")) for name in ("types", "core.compiler", "pycc")
            )
        extension = pycc.CC(target.name.partition(".")[0])  # fails at once without compilers
        extension.output_dir, extension.output_file, extension.target_cpu = folder, target.name, "generic"
        call_kernels()
        for kernel in kernels():
            # A constant argument is one of a kernel that calls it.
            for signature in kernel.signatures:
                if not kernel.targetoptions.get("forceinline") and not any(
                    isinstance(each, types.Literal) for each in signature
                ):
                    takes = [types.Tuple(tuple(each.types)) if _is_named(each) else each for each in signature]
                    exported = extension.export(
                        jit.extension_name(kernel), kernel.overloads[signature].signature.return_type(*takes)
                    )
                    exported(_of_tuples(kernel, signature))

        def flags() -> Any:  # noqa: ANN401 - numba has no types
            """The flags that `jit.njit` sets: `numba` has no option to read them."""
            made = compiler.Flags()
            made.release_gil, made.error_model = True, "numpy"
            return made

        pycc.compiler.Flags = flags
        extension.compile()
        for old in jit.COMPILED.iterdir():
            if old.is_file():
                old.unlink()
            elif not old.name.startswith(tempfile.gettempprefix()):  # of another process
                shutil.rmtree(old)
        Path(folder, target.name).rename(target)
    return True


def _is_named(kind: Any) -> bool:  # noqa: ANN401 - numba has no types
    return hasattr(kind, "instance_class")


def _of_tuples(kernel: Any, signature: tuple[Any, ...]) -> Callable[..., object]:  # noqa: ANN401 - numba has no types
    """A function that makes named tuples of the arguments and calls the kernel."""
    if not any(_is_named(each) for each in signature):
        return cast("Callable[..., object]", kernel.py_func)
    classes = {each.instance_class.__name__: each.instance_class for each in signature if _is_named(each)}
    arguments = [
        f"{each.instance_class.__name__}({', '.join(f'a{at}[{item}]' for item in range(len(each.types)))})"
        if _is_named(each)
        else f"a{at}"
        for at, each in enumerate(signature)
    ]
    names = ", ".join(f"a{at}" for at in range(len(signature)))
    made: dict[str, Any] = {"kernel": kernel, **classes}
    exec(f"def call({names}):\n    return kernel({', '.join(arguments)})\n", made)  # noqa: S102 - numba needs each item by its constant index
    return cast("Callable[..., object]", made["call"])


def kernels() -> Iterator[Any]:
    """All kernels that numba has compiled: those that Python calls, and those that they call."""
    for name in _MODULES:
        module = importlib.import_module(f"tikv_br.formats.{name}")
        for found in vars(module).values():
            if hasattr(found, "stats") and found.py_func.__module__ == module.__name__:
                yield found


def call_kernels() -> None:
    """Call every kernel with one row, through what the other packages call."""
    from tikv_br.formats import rows  # imports kernels, which must not be before their cache is set

    key, one = columns.from_list([b"key"]), columns.from_list([b"one"])
    record = columns.records(key, one)
    page = cast("rawscan.RawPage", rawscan.measure(_PAGE))
    page.split()
    checksum.checksum(key, one, b"r")
    v1 = KeyCodec(ApiVersion.V1)
    for version in ApiVersion:
        codec = KeyCodec(version)
        stored = rows.to_storage(record, codec)
        rows.from_storage(stored, codec)
        _call_sst_kernels(stored, page, v1, codec)
    rows.live(record, 0)
    long = columns.records(key, columns.from_list([bytes(256)]), ts=np.ones(1, np.uint64))
    default, write = mvcc.split(long)
    list(mvcc.join([write], [default]))
    _call_row_kernels(record)
    event = cast("cdc.ChangeEvent", cdc.parse(b""))
    event.records(v1, EVERY_KEY)


def _call_sst_kernels(stored: pa.RecordBatch, page: rawscan.RawPage, source: KeyCodec, codec: KeyCodec) -> None:
    from tikv_br.formats.sst.reader import SstReader
    from tikv_br.formats.sst.row_check import check_rows
    from tikv_br.formats.sst.source import MemorySource
    from tikv_br.formats.sst.writer import SstWriter

    for is_page in (False, True):
        sink = io.BytesIO()
        writer = SstWriter(sink.write)
        if is_page:
            writer.append_page(page, source, codec)
        else:
            writer.append(stored)
        writer.finish()
        check_rows(SstReader(MemorySource(sink.getvalue())), codec.api_version)


def _call_row_kernels(record: pa.RecordBatch) -> None:
    from tikv_br.formats import order
    from tikv_br.formats.kernels import rawput
    from tikv_br.formats.kernels.order import last_of_keys

    keys, values, prefix = columns.view(record["key"]), columns.view(record["value"]), columns.from_bytes(b"r")
    order.by_key(pa.concat_batches([record, record]))
    last_of_keys(*keys, np.uint64(1))
    rawput.pairs(*keys, *values, prefix, 0, 1)
    rawput.names(*keys, prefix, 0, 1)
    rawput.packed(np.ones(1, np.uint64))


def main() -> int:
    """Make the extension, or fill numba's cache; the exit code."""
    if not jit.has_plain_settings():
        print("error: a NUMBA_ variable of the environment changes the code; unset it", file=sys.stderr)  # noqa: T201
        return 1
    try:
        text = "compiled the kernels" if precompile() else "the kernels are compiled"
    except Exception as error:  # noqa: BLE001 - numba, setuptools and compilers have errors of any kind
        if "--extension" in sys.argv[1:]:
            print(f"error: the kernels cannot be compiled: {error}", file=sys.stderr)  # noqa: T201
            return 1
        text = f"compiling the kernels into numba's cache; for the extension, which starts faster: {error}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        # A process of its own, as the kernels have another cache here.
        program = "from tikv_br.formats import precompile; precompile.call_kernels()"
        os.execv(sys.executable, [sys.executable, "-c", program])  # noqa: S606 - these arguments are ours
    print(text, file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
