"""Restoring a backup set into a cluster: checks, split and scatter, download, ingest, checksum.

Imports the engines (spark, cluster, storage, backupset) and formats; never backup, incremental or the command line.
"""
