"""Backups as objects: their names, the order in which they are written and read, and their checks.

Nothing here talks to a cluster.

Modules, in reading order:

- `layout`: names of a backup's objects
- `backup_writer`, `backup_set`: makes a backup, and opens one
- `manifest`, `backupmeta`: our records of a backup and of its run, and the Go TiKV-BR's
- `sealed`: records (`tikv_br.records`) in the storage, encrypted if the backup is
- `files`: the record of a data file, its writer, and the checks of its identity
- `coverage`: proof that files cover the ranges of a backup
- `ledger`: what each task has done, for resuming
- `lease`: the lease on the path of a backup
- `rows`: the rows of data files
- `index`: the index of the backups in a folder
- `prune`: which backups to keep, and removing the others
"""
