"""RawKV keys: their forms, ranges, rewrites and text.

Modules, in reading order:

- `codec`: user key, RPC key, PD bound and RocksDB key
- `ranges`: key ranges and their set operations
- `rewrite`: keys of a backup under another prefix
- `text`: keys as text, in the forms of ``--format``
"""
