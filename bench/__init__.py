"""Costs of tikv-br, compared with other tools for the same work: run by ``scripts/bench.sh``.

One module a bench, each with a function ``figures(scale)``. Nothing of the product imports this.
"""
