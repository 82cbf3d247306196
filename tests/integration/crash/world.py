"""Traces that a broken operation may have left: files, safe points, import mode, schedulers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from tests.support.live_cluster import LiveCluster
from tikv_br.backupset import layout
from tikv_br.backupset.lease import PathLease, acquire, break_lease
from tikv_br.cluster import safepoint
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

Files = dict[str, tuple[int, int, int]]


def files(folder: Path, but: str = "/lease/") -> Files:
    """Every file below a folder, also hidden ones, and every empty directory: with what changes when one is written.

    What others remove meanwhile, as a tail does with what it has renamed, is not there.
    """
    found: Files = {}
    for place, folders, names in os.walk(folder):
        here = os.path.relpath(place, folder)
        if not folders and not names and here != ".":
            found[f"{here}/"] = (0, 0, 0)
        for name in (os.path.normpath(f"{here}/{each}") for each in names):
            if but not in f"/{name}":
                with contextlib.suppress(FileNotFoundError):
                    status = (folder / name).stat()
                    found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def forget_safe_points(live: LiveCluster) -> None:
    """Remove ours."""
    for name in live.safe_points():
        safepoint.release(live.cluster.pd, name)


def disturbed(live: LiveCluster) -> list[str]:
    """Stores in import mode or with a limit of downloads, and schedulers that are paused."""
    stores = live.get("/playground/stores")
    importing = [f"store {each['store_id']} imports" for each in stores if each["import_mode"]]
    limited = [f"store {each['store_id']} limits downloads" for each in stores if each["download_limit"]]
    return importing + limited + live.cluster.pd_http.schedulers(paused=True)


class Rival:
    """Takes a path from its owner, as if that had slept too long, and works there until stopped."""

    def __init__(self, place: Path, lease_place: Callable[[], Path | None] | None = None) -> None:
        """``lease_place`` finds where the lease lies, if that is not at the place itself."""
        self._place = place
        self._lease_place = lease_place or (lambda: place)
        self._lease: PathLease | None = None
        self.found: Files = {}
        """Contents of the folder around the place when it was taken."""

    def take(self) -> None:
        """Take it, if there is anyone to take it from."""
        place = self._lease_place()
        if place is None:
            return
        store = open_store(StorageLocation("local", str(place)))
        if break_lease(store, force=True) is not None:
            self._lease = acquire(store, "rival")
            self.found = files(self._place.parent)

    @property
    def has_taken(self) -> bool:
        """Whether there was a lease to lose."""
        return self._lease is not None

    @property
    def found_whole(self) -> bool:
        """Whether it came too late to a backup that was complete."""
        return f"{self._place.name}/{layout.META}" in self.found

    def leave(self) -> None:
        """Give the path back."""
        if self._lease is not None:
            self._lease.release()
