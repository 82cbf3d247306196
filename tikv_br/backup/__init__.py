"""Backup of a cluster into a storage, and merges of backups.

What both have in common with incremental backups, exports and bulk loads is in `tikv_br.dataflow`. Modules, in reading order:

- run: the lists of steps for raw and for transactional data, and those that only a backup of a cluster has
- copy: runs the tasks of the chosen engine
- comparison: `--checksum`, the finished copy against the cluster
- scan: the task of the scan engine, which reads rows page by page
- store: the task of the store engine, which has the stores write SSTs, its requests for raw and for transactional data, and what it records of the files
- store_responses: the stores' responses to backup requests
- dated: `{time}` in the URL, a folder for each run
- merge: `backup merge`, a full backup from others and a log archive

Incremental backups (`--base`) are in `incremental/backup.py`.
"""
