"""Loads the rows of any Spark input into a cluster as SSTs, or by puts.

The rows become a temporary backup of the target's API version, which is then restored; splitting, scattering, ingesting,
resuming and comparing are done by the code of a restore.

Modules, in reading order:

- `run`: options, and the load from its options to its summary; the online alternative, which puts the rows
- `stage`: the steps that make the temporary backup
- `files`: inputs that this process reads without Spark
- `local`: sorts their rows on threads
- `partition`: the task that writes one partition, and the backup that they make
- `runs`: the same for rows that Spark writes to our data source: sorted runs instead of an input

Never imports the command line.
"""
