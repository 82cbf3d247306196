"""The tail: feed, sorter and sinks that keep a recovery cluster seconds behind its source.

May import the engines of ``tikv_br`` and ``formats``; never the command line.
"""
