"""Clients of PD, TiKV stores and etcd: routing, retries, timestamps, safe points and RawKV calls.

Knows nothing of backups, storage or the command line. Failures are raised as errors of `tikv_br.errors`.

Modules, in reading order:

- `config`: addresses, timeouts and TLS files
- `cluster`: one cluster with its clients, the timestamp flush, and the first key of a range
- `channel`: gRPC channels, and gRPC statuses as errors
- `pd_connection`, `pd`: the connection to PD's leader, its errors, and its gRPC calls
- `pd_http`: PD's HTTP API, and cluster status
- `topology`, `versions`: stores, their versions, and the API version that they are configured with
- `keyspaces`: names and ids of keyspaces
- `store`: the calls of one store, the pool of all stores, a store's changes, and requests that would crash a store
- `regions`, `region_errors`, `router`: the region cache, what region errors mean, and routing by key
- `scan`, `rawkv`, `puts`, `ttl`: range scans, RawKV calls, writes of Arrow columns, and expiries
- `locks`, `txn_calls`: locks of transactions, resolved as by every reader, and the requests for it
- `txnkv`: whether there are transactional rows, and the stores' checksum of them
- `rate_limit`: the maximum rate per store
- `timestamps`, `clock`, `safepoint`: PD timestamps, PD's time beside this machine's, service safe points and backup-ts
- `ingests`, `ingest_announcer`: announcements of ingests to those who follow changes
- `marks`: marks in the cluster that prove who made what
- `split`, `import_mode`: splitting and scattering regions, import mode and download limits
- `etcd_values`, `etcd`: etcd v3, and leases that are kept alive
- `pb`: generated protobuf messages
"""

from __future__ import annotations

import os

# gRPC writes its own log lines to stderr, between our progress lines. It reads this variable at its import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
