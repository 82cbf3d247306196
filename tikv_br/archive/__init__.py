"""The log archive: every change of a range of an API V2 cluster, as objects that prove that none is missing.

Talks to the storage only, never to a cluster. Modules, in reading order:

- `records`: the records of a log, and the names of its objects
- `objects`: reads segments, truncation and the newest checkpoint, and finds damage
- `coverage`: up to which time segments cover keys, and their gaps
- `log`: opens a log, and chooses the files of a range and a time
- `writer`: writes data files and segments
- `lookup`: the changes of one key
- `maintenance`: status, removal of old objects, and the operator's pause, resume and stop
- `compact`, `chunks`: rewrite many small segments as few large ones
"""
