"""Exports: the rows of a cluster or a backup as files that other tools read.

Reading order: `run` (options, list of steps, destination, summary), `task` (what is read, and how a part is written).
"""
