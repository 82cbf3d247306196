"""The flow of rows: what backups, incremental backups, merges, exports and bulk loads read, convert and write.

Modules, in reading order:

- options: where rows come from and in what form they are written; which API version can be converted to which
- plan: divides key ranges into intervals, one per task
- engine: the choice of the engine and of who runs the tasks
- task: what tasks have in common: the interval, retries, the result
- convert: converts rows between API versions
- write: writes rows into SST or Parquet files
- merge: backups and a log that are read together, as of one timestamp
- context: what the steps of a backup share
- path: the lock of the backup's path, and resuming an unfinished run
- steps: the steps that several operations have, from connecting to committing
- run: runs the steps, returns the summary; removes an unfinished backup

Rows come page by page from `tikv_br.cluster` (scan, prefetch, ttl) or from files (`tikv_br.backupset.rows`). Knows no operation.
"""
