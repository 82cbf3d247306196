"""Programs and recordings that tests compare with or run against: from scripts/test.sh, and from tests/data."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "bin"
GOLDEN_ARCHIVES = ROOT / "tests" / "data" / "golden"
PREVIOUS = ROOT / "tests" / "data" / "previous"
"""Files that the previous version wrote."""


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


def unpack_golden(archives: Path = GOLDEN_ARCHIVES, cache: Path = ROOT / ".cache" / "golden") -> Path:
    """Return the folder with the unpacked golden data; the first caller unpacks it. Safe to call from many processes.

    The folder is named after the content of the archives, so that a new recording never meets the files of an old one.
    """
    sources = sorted(archives.glob("*.tar.xz"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources))
    folder = cache / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpacking-") as parent:
        unpacked = Path(parent) / folder.name
        unpacked.mkdir()
        for path in sources:
            with tarfile.open(path) as archive:
                # Python before 3.11.4 has no filters; 3.12 and 3.13 warn without one.
                safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(unpacked, **safe)  # type: ignore[arg-type]
        for path in unpacked.rglob("*"):
            if path.is_file():
                path.chmod(0o444)  # tests change copies only
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster: its folder is complete
            if not folder.is_dir():
                raise
    return folder


GOLDEN_BACKUPS = (
    "v1",
    "v1_lz4",
    "v1_snappy",
    "v1_to_v2",
    "v1ttl",
    "v1ttl_to_v2",
    "v2",
    "v2_ranged",
    "v2_ks1_rpc",
    "v2_ks4242_rpc",
    "v2_3stores",
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True
