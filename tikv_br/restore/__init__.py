"""Restore: check the files and the target, split, ingest, prove equal; a list of steps.

May import the shared engines and ``formats``; not another operation, not the command line.
"""
