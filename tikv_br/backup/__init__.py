"""Backing up: planner, tasks of the engines, committer.

Imports the engines (spark, cluster, storage, backupset) and formats; never restore, incremental or the command line.
"""
