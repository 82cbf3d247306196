"""RocksDB block-based tables (SST files) to and from Arrow batches.

Modules, in reading order:

- `source`, `coding`, `compression`, `block`: ranged reads, varints, compression, footer and blocks
- `table`: an opened table: properties, index, and the lookup of one row
- `reader`: rows of a table as Arrow batches, and the kernel for blocks
- `check`, `row_check`: whether a store can ingest a table, by its structure and by its rows
- `encode`: kernels that fill blocks from rows and from RawScan pages
- `writer`: writes tables, in the memory that those kernels fill
"""
