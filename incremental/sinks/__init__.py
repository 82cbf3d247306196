"""Targets of changes. Sinks know nothing about feeds, checkpoints or safe points.

Modules, in reading order:
- base: the interface of a sink
- tikv: writes to a TiKV cluster
- kafka: writes to a Kafka topic
- writer: gives batches to a sink, with retries and at a limited rate
- url: parses ``--sink`` addresses; open: opens the sink of one; the sinks of a log archive and of JSON lines
"""
