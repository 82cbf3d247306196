"""Transactions of a playground's stores: Percolator's commands over the column families default, lock and write.

Modules, in reading order:
- mvcc: records of locks and commits, and how a reader finds its version among them
- state: what all stores share: the latch of writes, the largest ts of a reader, who waits for whom; checks before every command, and what every write does
- prewrite: prewrites (also with async commit and in one phase) and pessimistic locks
- resolve: commits, rollbacks, and what becomes of a transaction that left locks
- reads: gets, scans, locks, checksums, range deletes and GC
"""
