"""Backup of a cluster into a storage, and merges of backups.

What both have in common with incremental backups, exports and bulk loads is in `tikv_br.dataflow`. Modules, in reading order:

- run: the list of steps, and those that only a backup of a cluster has
- engines: runs the tasks of the chosen engine
- scan: the task of the scan engine, which reads rows page by page
- store_task: the task of the store engine, which has the stores write SSTs
- store_requests: its requests for raw and for transactional data
- store_responses: the stores' responses to backup requests
- store_files, store_entry: records and rewrites the files that stores wrote
- txn: the list of steps for transactional data
- compare: `--checksum`, the finished copy against the cluster
- dated: `{time}` in the URL, a folder for each run
- merge: `backup merge`, a full backup from others and a log archive

Incremental backups (`--base`) are in `incremental/backup.py`.
"""
