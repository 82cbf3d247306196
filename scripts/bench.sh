#!/usr/bin/env bash
# Measure tikv-br beside others on this machine: a table on the terminal, the figures as JSON (docs/benchmarks.md).
#
#   scripts/bench.sh                     everything, some minutes
#   scripts/bench.sh --quick             the most of it with less data: a minute on a quiet machine
#   scripts/bench.sh --only scan_to_sst --json figures.json
#
# Without --json the figures go to .cache/bench.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }

.venv/bin/python -c 'import pytest, rocksdict' 2>/dev/null || scripts/setup.sh test
scripts/install_client_go.sh >/dev/null </dev/null || say "no client-go to compare with: scripts/install_client_go.sh failed"

mkdir -p .cache
PYTHONPATH=$PWD exec .venv/bin/python -m bench --json .cache/bench.json "$@"
