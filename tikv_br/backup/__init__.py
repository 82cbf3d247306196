"""Backup of a cluster into a storage.

Modules, in reading order:

- options: the options of a backup, and which API version can be converted to which
- run: runs the steps, returns the summary; aborts an unfinished backup
- steps: the list of steps
- context: what the steps share, and the choice of the engine
- path: the lock of the backup's path, and resuming an unfinished run
- dated: `{time}` in the URL, a folder for each run
- plan: divides key ranges into intervals, one per task
- run_tasks: makes the plan and runs its tasks
- task: what the tasks of both engines share
- scan: the task of the scan engine, which reads rows page by page
- convert: converts rows between API versions
- data_files: writes rows into SST or Parquet files
- store_task: the task of the store engine, which has the stores write SSTs
- store_responses: the stores' responses to backup requests
- store_files: records and rewrites the files that stores wrote
- compare: `--checksum`, the finished copy against the cluster
- merge: `backup merge`, a full backup from others and a log archive

Incremental backups (`--base`) are in `incremental/backup.py`.

Imports archive, spark, cluster, storage, backupset and formats; never restore, incremental or the command line.
"""
