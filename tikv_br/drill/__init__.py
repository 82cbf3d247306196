"""Rehearsing a recovery end to end on a throw-away cluster.

Imports the other operations' engines and formats; never the command line.
"""
