"""Comparison of two clusters, or of a backup (A) and a cluster (B), and repair of B.

Modules, in reading order:

- run: runs the steps, returns the summary
- places: the options of a comparison, its sides A and B, and the ranges to compare
- task: the tasks that compare ranges, and write differences to B

Imports compare, tasks, cluster, storage, backupset and formats. Writes only to B, and only in a repair.
"""
