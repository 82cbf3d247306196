"""The flow of rows: what backups, incremental backups, merges, exports and bulk loads read, convert and write.

Modules, in reading order:

- options: where rows come from and in what form they are written; which API version can be converted to which
- plan: the choice of the engine and of who runs the tasks; divides key ranges into intervals, one per task
- read: the rows of a cluster page by page, and of backups and a log from their files: which timestamps they have, and how they are divided into tasks
- convert: converts rows between API versions
- write: writes rows into SST or Parquet files; what tasks have in common: the interval, retries, the result
- steps: the steps that several operations have, from connecting to committing; the lock of the backup's path, and resuming an unfinished run
- run: what the steps share; runs the steps, returns the summary; removes an unfinished backup

Pages come from `tikv_br.cluster` (scan, ttl), rows of files from `tikv_br.backupset.rows`. Knows no operation.
"""
