"""Comparison of rows: of a cluster with another one, or of a backup's files with a cluster.

A is the reference, B is a cluster. Equal ranges are recognized by the stores' checksums, other ones are bisected and read.

Modules, in reading order:

- report: differences and counts
- rows: compares rows of both sides, batch by batch
- sides: a cluster, a file of a backup, or rows in memory as a side, and the checksums that stores may answer for rows that expire
- ranges: compares one range, from its checksum down to the keys that differ
- files: compares files of a backup, raw or transactional, with a cluster

Imports cluster, storage, backupset and formats. Writes nothing.
"""
