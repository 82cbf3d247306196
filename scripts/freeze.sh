#!/usr/bin/env bash
# Write constraints.txt from what is installed in .venv: name and version only, no addresses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    echo "# What the tests ran with, for pip install -c constraints.txt. Written by scripts/freeze.sh."
    .venv/bin/pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==[^ ]+$' | sort -f
} >constraints.txt
