"""Restore of a backup into a cluster.

Modules, in reading order:

- options: the options of a restore
- run: runs the steps, returns the summary; aborts unfinished restores
- steps: the list of steps, and those before the checks
- txn: the list of steps for transactional data, and those of its own
- target: the steps that check target and files
- announce: the steps for timestamps and followers
- transfer: the steps that run the tasks
- comparison: the steps after the transfer
- context: what the steps share
- plan: the wanted parts of the files, and where to split the target
- inspect: validates files before a store reads them
- ingest: the task that has stores ingest a part of a file
- download, upload: the ways of a part to the stores
- put: the task that writes a part of a file with RawBatchPut
- resume: the steps that resume a restore, and those for import mode
- record: the restore checkpoint and other objects of an unfinished restore

Imports spark, cluster, storage, backupset and formats; never another operation or the command line.
"""
