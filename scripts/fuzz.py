#!/usr/bin/env python3
"""Damage what is not ours by the thousand and read it: ``.venv/bin/python scripts/fuzz.py --target sst|page|cdc|write --inputs N --seed S [--golden FOLDER]``.

Readers run in processes of their own with 1 GiB of memory to spare. Whatever ends otherwise than by reading or by an
error of ours (another exception, a signal, no end) is told with its seed, and its input is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzzing.run import main

if __name__ == "__main__":
    sys.exit(main())
