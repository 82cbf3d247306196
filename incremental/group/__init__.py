"""A group of processes that share changefeeds: what it knows of itself in etcd, and who does what.

What lives here never moves a change by itself: `incremental.replicate` does.
"""
