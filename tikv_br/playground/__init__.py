"""A development cluster: PD and stores over real gRPC on 127.0.0.1, their data in one RocksDB.

No Raft, one copy: made for development and tests, never for data that matter. See docs/playground.md.
"""
