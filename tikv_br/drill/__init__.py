"""Rehearsing a recovery end to end, in a playground made for it or in a place of a cluster that nobody uses.

Imports the other operations' engines and formats; never the command line.
"""
