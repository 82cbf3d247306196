"""Backups as objects: their names, the order in which they are written and read, and their checks.

Nothing here talks to a cluster.

Modules, in reading order:

- `layout`: names of a backup's objects
- `backup_writer`, `backup_set`: makes a backup, and opens one
- `manifest`, `backupmeta`: our record of a backup, and the Go TiKV-BR's
- `sealed`: records (`tikv_br.records`) in the storage, encrypted if the backup is
- `files`: the record of a data file, its writer, and the checks of its identity
- `coverage`: proof that files cover the ranges of a backup
- `ledger`: what each task has done, for resuming
- `run_record`, `lease_record`, `lease`: the state of a backup's path with the record of its run, and the lease on it
- `rows`: the rows of data files
- `index_entry`, `index`, `rebuild`: the index of the backups in a folder
- `retention`, `removal`, `prune`: which backups to keep, and removing the others
"""
