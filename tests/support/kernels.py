"""Programs that call kernels, for a Python of their own."""

CALL_ALL = """
import json, sys
from tikv_br.formats import jit, precompile
precompile.call_kernels()
print(json.dumps({"by_extension": jit.EXTENSION is not None, "numba": "numba" in sys.modules, "signatures": {each.__qualname__: len(each.signatures) for each in precompile.kernels()}}))
"""
"""Calls all kernels once; prints who ran them, as JSON."""
