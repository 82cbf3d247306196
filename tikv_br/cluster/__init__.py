"""How to talk to PD and the stores: routing, retries, time, safe points and RawKV calls.

What lives here knows no backup, no storage and no command line; answers come back as values, failures as our errors.
"""

from __future__ import annotations

import os

# gRPC's own log lines would mix with progress on stderr; what went wrong is in our errors. Read at its import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
