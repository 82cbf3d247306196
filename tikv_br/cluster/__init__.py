"""Clients of PD, TiKV stores and etcd: routing, retries, timestamps, safe points and RawKV calls.

Knows nothing of backups, storage or the command line. Failures are raised as errors of `tikv_br.errors`.

Modules, in reading order:

- `config`: addresses, timeouts and TLS files
- `cluster`, `flush`: one cluster with its clients, the timestamp flush, and the first key of a range
- `channel`: gRPC channels, and gRPC statuses as errors
- `pd_errors`, `pd_connection`, `pd`: errors of PD, the connection to its leader, and its gRPC calls
- `pd_http`: PD's HTTP API, and cluster status
- `topology`: stores, and the API version that they are configured with
- `store`, `event_feed`: the calls of one store, the pool of all stores, and a store's changes
- `request_guards`: requests that would crash a store
- `regions`, `region_errors`, `router`: the region cache, what region errors mean, and routing by key
- `scan`, `rawkv`, `puts`: range scans, RawKV calls, and writes of Arrow columns
- `locks`, `txn_calls`: locks of transactions, resolved as by every reader, and the requests for it
- `checksum`: the stores' checksum of transactional rows
- `txnkv`: whether there are transactional rows
- `rate_limit`: the maximum rate per store
- `timestamps`, `safepoint`: PD timestamps, service safe points and backup-ts
- `split`, `import_mode`: splitting and scattering regions, import mode and download limits
- `etcd_values`, `etcd`, `etcd_lease`: etcd v3, and leases that are kept alive
- `pb`: generated protobuf messages
"""

from __future__ import annotations

import os

# gRPC writes its own log lines to stderr, between our progress lines. It reads this variable at its import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
