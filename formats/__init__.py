"""Pure conversions between bytes and Arrow: keys, values, checksums, scan pages, change events, put requests, SSTs, Parquet.

No I/O, no gRPC, no clock, no randomness, and no import from the other packages.

Modules, in reading order:

- `api_version`, `limits`, `errors`: API versions, what stores accept, and the errors of this package
- `keys`, `values`: keys and values of one row in all their forms
- `columns`, `tables`: the Arrow schemas of rows, columns as numpy arrays, and tables of them
- `rows`: batches between user records and stored rows
- `mvcc`: rows of transactions, in two column families
- `order`: rows sorted by key, each key once, and merges of sorted rows
- `checksum`: RawKV checksums
- `rawscan`, `cdc`: pages of RawScan, events of change feeds
- `sst`, `parquet`: data files
- `kernels`, `jit`, `precompile`: loops over Arrow memory, and their compilation at the first call or ahead of it
- `json_types`, `numbers`: types of parsed JSON, numbers in text
- `loadgen`: generated rows for load tests
"""
