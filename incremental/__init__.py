"""The tail: feed, sorter and sinks that keep a recovery cluster seconds behind its source.

May import the engines of ``tikv_br`` and ``formats``; never the command line.
"""

__part_of__ = "tikv-br"  # what tells this package from another of the same name (see tikv_br.cli.clash)
