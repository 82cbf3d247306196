#!/usr/bin/env python3
"""Have a sync at steady load for half an hour and see that it takes no more and more: ``.venv/bin/python scripts/soak.py [--seconds 1800]``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.trust.soak import main

if __name__ == "__main__":
    sys.exit(main())
