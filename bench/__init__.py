"""What tikv-br costs, beside what others cost for the same work: run by ``scripts/bench.sh``.

One module a bench, each with a function ``figures(scale)``. Nothing of the product imports this.
"""
