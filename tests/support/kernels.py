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

CALL_ONE = """
import json
from tikv_br.formats import rawscan
rawscan.measure(b"")
from tikv_br.formats.kernels.rawscan import measure
print(json.dumps([sum(measure.stats.cache_hits.values()), sum(measure.stats.cache_misses.values())]))
"""
"""Calls one kernel; prints its cache hits and misses, as JSON."""
