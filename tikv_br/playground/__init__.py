"""A development cluster: PD and stores over real gRPC on 127.0.0.1, with their data in one RocksDB.

There is no Raft and only one copy of the data: use it for development and tests, never for important data. See
docs/playground.md.

Modules, in reading order:
- launcher, home, settings: starting and finding playgrounds; their directories and settings
- cluster: the process of a playground, its PD and its stores
- store_state, timestamps, node: what the services of one store share
- servers: gRPC and HTTP servers, and ports
- region, region_errors, regions, scheduler: the region table, its errors, and balancing
- pd_server: the members of PD; pd_state, pd_gc, pd_config: what they share; pd_http, pd_etcd, etcd: their calls
- engine, encoding: the shared RocksDB, and how each API version encodes rows
- tikv_service, request_checks: the requests of clients, RawKV among them, and checks before all of them
- txn: transactions
- backup_service, external_storage: backups, their files and storage
- import_service, sst_file: downloads, uploads and ingests of SSTs
- cdc_stream, cdc_hub: change feeds
- failpoints, admin: faults on demand, with what surrounds every call, and the admin API
"""
