"""Garbage collection of a cluster without TiDB: what holds it back, and a worker that advances it.

Modules, in reading order:

- status: the safe points of GC and of all services, what they belong to, and which one holds GC back
- metrics: these figures for Prometheus
- election: which of several workers leads, in etcd
- transactions: no GC beside that of other programs, nor above locks
- worker: advances the GC safe point while it leads
- watch: how a worker is doing, for its HTTP server
- release: removes a service safe point that nobody renews

Imports cluster.
"""
