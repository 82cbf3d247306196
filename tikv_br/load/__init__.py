"""Loading pairs into a cluster from files or a generator: sources yield records, the loader batches and puts them.

Imports cluster and formats; never the command line.
"""
