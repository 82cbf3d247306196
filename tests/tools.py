"""Programs that tests compare with or run against, as scripts/test.sh installs them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bin"


def find_tool(*names: str, hint: str, variable: str = "") -> str:
    """Return the path of the first of a program's names found: in an environment variable, PATH or the checkout's cache."""
    named = os.environ.get(variable) if variable else None
    places = [named, *(place for name in names for place in (shutil.which(name), str(CACHE / name)))]
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    return missing(f"no {names[0]}: {hint}")


def missing(what: str) -> NoReturn:
    """End a test whose tool is not there: skipped on a developer's machine, failed in CI, where nothing may be left out."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (in CI every tool must be there)")
    pytest.skip(what)
