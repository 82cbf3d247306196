"""Exports: the rows of a cluster or a backup as files that other tools read.

`run` has all: what is read, how a task writes a part, options, list of steps, destination, summary.
"""
