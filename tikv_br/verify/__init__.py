"""Verification of a backup, or of a cluster against it. Changes nothing.

Modules, in reading order:

- options: the options of a verification, and `Finding`
- run: runs the steps, returns the summary
- steps: the list of steps
- checks: the tasks, one per file or key range

Imports spark, cluster, storage, backupset and formats.
"""
