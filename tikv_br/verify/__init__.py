"""Verification of a backup, or of a cluster against it. Changes nothing.

Modules, in reading order:

- options: the options of a verification, and `Finding`
- run: the list of steps; runs them, returns the summary
- checks: the tasks, one per file or key range; `row_sums`: sums of rows to compare

Imports tasks, cluster, storage, backupset and formats.
"""
