"""Programs that call compiled kernels, for a Python of their own."""

CALL_ALL = """
import json
from tikv_br.formats import precompile
precompile.call_kernels()
print(json.dumps({
    f"{package}.{kernel.__qualname__}": [sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()), len(kernel.signatures)]
    for package, kernel in precompile.kernels()
}))
"""
"""Calls all kernels once; prints cache hits, misses and signatures of each, as JSON."""
