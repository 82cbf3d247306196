"""What the package offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import formats.sst


def test_every_name_is_there() -> None:
    """Each exported name exists, and others are missed as from any module."""
    for name in formats.sst.__all__:
        assert getattr(formats.sst, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = formats.sst.Nonsense


@pytest.mark.parametrize(
    "statement", ["from formats.sst import check_structure, Table", "from formats.sst import Compression"]
)
def test_light_imports(statement: str) -> None:
    """Looking at a table's structure and parsing a compression's label load neither the compiler nor Arrow."""
    program = f"{statement}\nimport sys\nprint([name for name in ('numba', 'pyarrow', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
