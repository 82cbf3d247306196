"""Restore of a backup into a cluster.

Modules, in reading order:

- options: the options of a restore
- run: the lists of steps for raw and for transactional data; runs them, returns the summary; aborts unfinished restores
- target: the steps that check target and files, and those for timestamps and followers
- transfer: the steps that run the tasks, and those after the transfer; the task that writes a part of a file with RawBatchPut
- context: what the steps share
- plan: the wanted parts of the files, and where to split the target
- inspect: validates files before a store reads them
- ingest: the task that has stores ingest a part of a file, which reaches them by download or upload
- resume: the steps that resume a restore, and those for import mode
- record: the restore checkpoint and other objects of an unfinished restore

Imports tasks, cluster, storage, backupset and formats; never another operation or the command line.
"""
