"""Exports: the rows of a cluster or a backup as files that other tools read.

Reading order: `options`, `run` (list of steps, summary), `steps`, `task` (what is read, and how a part is written), `destination`.
"""
