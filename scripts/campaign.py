#!/usr/bin/env python3
"""Run seeds of faults and count: ``.venv/bin/python scripts/campaign.py storage|cluster --seeds 1..1000``; see docs/reliability.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.trust.campaign import main

if __name__ == "__main__":
    sys.exit(main())
