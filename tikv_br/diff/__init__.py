"""Which ranges and which keys of two clusters, or of a backup and a cluster, differ; and putting the second right.

Imports the engines, ``proof`` and ``formats``. Writes nothing anywhere but where a repair was asked for.
"""
