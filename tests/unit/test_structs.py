"""The plugin of mypy finds functions of `dataclasses` that are called with a struct, or with flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.tools import ROOT

CODE = """
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar
from msgspec import Struct, structs
from tikv_br.cli.shared import TaskFlags

class A(Struct):
    x: int = 0

class B(A):
    pass

@dataclass
class C:
    x: int = 0
    a: A | None = None

T = TypeVar("T", bound=A)

def generic(one: T, other: A | C, kind: type[A]) -> None:
    replace(one)
    replace(other)
    fields(kind)

replace(A(), x=1)
replace(TaskFlags())
asdict(B())
fields(A)
replace(C(), a=replace(B()))
replace(C(), x=1)
fields(C)
structs.replace(B(), x=1)
"""


def test_functions_of_dataclasses_with_a_struct(tmp_path: Path) -> None:
    """Each call is named, also within another one; those of dataclasses and of structs' own functions are not."""
    place = tmp_path / "code.py"
    place.write_text(CODE)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, str(place)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    found = [line for line in done.stdout.splitlines() if "is a struct" in line or "has flags" in line]
    wrong = (
        "replace(one",
        "replace(other",
        "fields(kind",
        "replace(A",
        "replace(T",
        "asdict",
        "fields(A",
        "replace(C(), a",
    )
    wanted = [number for number, line in enumerate(CODE.splitlines(), 1) if line.strip().startswith(wrong)]
    assert [int(line.split(":")[1]) for line in found] == wanted, done.stdout
