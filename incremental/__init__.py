"""Sync: copies changes of a cluster to a sink continuously, seconds behind the source.

Modules, in reading order:
- sync: one sync from its options to its end
- handover: where a sync starts, and the safe point that protects the start
- feed: the change feed of a range: subscriptions, resolved-ts, gaps
- sorter: sorts changes by timestamp, in memory and on disk
- sinks: where changes are written: a cluster, a log archive, a Kafka topic, JSON lines
- kafka: changes in Kafka topics: messages, addresses, the client
- pipeline: the loop from feed to sink
- status: the status of that loop, with rates and lags
- checkpoint: saves how far a sync has come
- backup: incremental backups
- diff_mode: syncs sources without a change feed by comparing ranges
- group: several processes (captures) that share changefeeds through etcd
- watch: status over HTTP

May import the engines of ``tikv_br`` and ``formats``, never the command line.
"""
