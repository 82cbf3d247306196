"""What a backup is, in objects: names, order of writing and reading, and the proofs that it is whole.

Knows storage and the wire messages; nothing of clusters, tasks or the command line.
"""
