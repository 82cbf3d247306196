from __future__ import annotations

import subprocess
import sys

LIGHT = ("api_version", "checksum", "errors", "keys.codec", "keys.ranges", "keys.text", "mvcc", "rawscan", "values")


def test_modules_of_the_control_path_are_light() -> None:
    """Code for flags and single requests imports no numba, numpy or pyarrow, which take half a second."""
    program = f"""
import importlib, sys
for name in {LIGHT}:
    importlib.import_module("tikv_br.formats." + name)
print(sorted({{"numba", "numpy", "pyarrow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
