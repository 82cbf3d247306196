"""Loads key-value pairs into a cluster.

`loader` reads pairs from files, or generates them, and writes them in batches.

Imports cluster and formats; never the command line.
"""
