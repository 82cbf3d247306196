"""Garbage collection of a cluster without TiDB: what holds it back, and a worker that advances it.

Modules, in reading order:

- status: the safe points of GC and of all services, what they belong to, which one holds GC back, and the removal of one that nobody renews
- metrics: these figures for Prometheus
- worker: which of several workers leads, in etcd; advances the GC safe point while it leads, never beside other programs or above locks
- watch: how a worker is doing, for its HTTP server

Imports cluster.
"""
