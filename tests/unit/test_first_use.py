"""Several threads of a process that use a C extension at once, for the first time: no process dies of it."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.tools import ROOT
from tests.unit.backupset.samples import describe, do_all
from tikv_br.backupset import manifest
from tikv_br.backupset.manifest import Manifest, Statistics
from tikv_br.formats.precompile import call_kernels
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

THREADS = 8
PROCESSES = 200
DESCRIBING = {"convert", "Decoder", "decode", "Encoder"}
"""What has msgspec describe a type."""


def test_one_module_has_msgspec_describe_types() -> None:
    """Under one lock: `tikv_br.records.convert` and its decoders."""
    for folder in ("tikv_br", "incremental", "formats"):
        for path in (ROOT / folder).rglob("*.py"):
            found = uses_of_msgspec(path.read_text(encoding="utf-8"))
            assert not found or path == ROOT / "tikv_br" / "records.py", f"{path} uses {found}: use tikv_br.records"
    assert uses_of_msgspec("from msgspec import json as j\nj.Decoder(int)") == {"json"}
    assert uses_of_msgspec("import msgspec\nmsgspec.json.decode(b'', type=int)") == {"json", "decode"}


def uses_of_msgspec(source: str) -> set[str]:
    """Names with which a module can have msgspec describe a type."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "msgspec":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("msgspec."):
            found.add(node.attr)
    return found & (DESCRIBING | {"json", "msgpack", "yaml", "toml"})


def at_once(path: str, *, with_kernels: bool) -> None:
    """Have threads load the same manifest, open a storage, and call all kernels, which takes a second."""
    sys.setswitchinterval(1e-6)
    data, together = Path(path).read_bytes(), threading.Barrier(THREADS)
    failed: list[BaseException] = []
    work: list[Callable[[], object]] = [
        partial(manifest.load, data),
        partial(open_store, StorageLocation("local", "/tmp")),
    ]
    work += [call_kernels] * with_kernels

    def use(number: int) -> None:
        together.wait()
        try:
            for place in range(len(work)):
                work[(place + number // 6) % len(work)]()
        except BaseException as error:  # noqa: BLE001 - it is the child's exit code
            failed.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def count_deaths(path: str) -> int:
    """How many of the children die that use extensions this process has only imported."""
    deaths = 0
    for number in range(PROCESSES):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                at_once(path, with_kernels=number % 50 == 0)
                code = 0
            finally:
                os._exit(code)
        deaths += os.waitpid(pid, 0)[1] != 0
    return deaths


@pytest.mark.slow
def test_first_uses_at_once() -> None:
    """200 processes of eight threads each; before types were described under a lock, some died of SIGSEGV."""
    with tempfile.TemporaryDirectory() as folder, Forks(__name__) as forks:
        store = open_store(StorageLocation("local", folder))
        files = tuple(file for entry in do_all(store) for file in entry.files)
        path = Path(folder, "manifest")
        path.write_bytes(manifest.dump(Manifest(describe(store), Statistics(1, 2, 3, 4, 5, 6), files, bytes(32))))
        forks.start(partial(count_deaths, str(path)))
        assert forks.wait() == 0
