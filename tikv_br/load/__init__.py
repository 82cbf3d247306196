"""Loads key-value pairs into a cluster.

Modules, in reading order:

- sources: reads pairs from files, or generates them
- loader: writes the pairs in batches

Imports cluster and formats; never the command line.
"""
