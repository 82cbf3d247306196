"""Exports of the package, and the cost of importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tikv_br.formats.sst


def test_every_name_is_there() -> None:
    """Each exported name exists, and others are missed as from any module."""
    for name in tikv_br.formats.sst.__all__:
        assert getattr(tikv_br.formats.sst, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = tikv_br.formats.sst.Nonsense


@pytest.mark.parametrize(
    "statement",
    ["from tikv_br.formats.sst import check_structure, Table", "from tikv_br.formats.sst import Compression"],
)
def test_light_imports(statement: str) -> None:
    """Looking at a table's structure and parsing a compression's label load neither the compiler nor Arrow."""
    program = f"{statement}\nimport sys\nprint([name for name in ('numba', 'pyarrow', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
