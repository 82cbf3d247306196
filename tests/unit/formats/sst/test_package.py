"""The cost of importing the package."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "from tikv_br.formats.sst.check import check_structure",
        "from tikv_br.formats.sst.compression import Compression",
    ],
)
def test_light_imports(statement: str) -> None:
    """Looking at a table's structure and parsing a compression's label load neither the compiler nor Arrow."""
    program = f"{statement}\nimport sys\nprint([name for name in ('numba', 'pyarrow', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
