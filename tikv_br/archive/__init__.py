"""The log archive: every change of a range of an API V2 cluster, as objects that prove that none is missing.

Talks to the storage only, never to a cluster. Modules, in reading order:

- `records`: the records of a log, the names of its objects, reading them and finding damage
- `log`: opens a log; up to which time segments cover keys, and their gaps; chooses the files of a range and a time; the changes of one key
- `writer`: writes data files and segments
- `maintenance`: status, removal of old objects, and the operator's pause, resume and stop
- `compact`: rewrites many small segments as few large ones
"""
