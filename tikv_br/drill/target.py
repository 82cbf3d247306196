"""Where a drill restores to. What it makes there it writes down before, and it removes only that."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from formats.api_version import ApiVersion
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.landing import Landing, claims_of
from tikv_br.drill.ledger import Creation, Kind
from tikv_br.errors import DrillRemains
from tikv_br.report.figures import counted

MARK = "made-by-drill"
"""A file in each folder that a drill has made; it names the drill."""


PRIVATE = 0o700
"""What is restored there is for nobody else's eyes."""
ROOT = 0

CLUSTER = "cluster"
"""What else is in it: the playground's own folder."""


class Target(Protocol):
    """A place to restore to."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    def plan(self, drill: str, backup: BackupSet) -> Creation:
        """What `make` would make for a backup; nothing is made yet. Raises a `TikvBrError` when it cannot be."""

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Landing:
        """Make it, and say where the backup's rows go."""


class PlaygroundHost(Protocol):
    """Who can run playgrounds: the command line, below which nothing knows of them."""

    def start(self, folder: Path, api_version: ApiVersion, stores: int) -> str:
        """Start one that outlives this process; returns its PD address."""

    def stop(self, folder: Path) -> None:
        """Stop the one of a folder, if one runs."""


@dataclass(frozen=True, slots=True)
class PlaygroundTarget:
    """A cluster of its own on this machine, started for the drill."""

    host: PlaygroundHost
    parent: Path
    """Each playground gets a folder of its own in this one."""
    stores: int = 3

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"an embedded playground of {counted(self.stores, 'store')}"

    def plan(self, drill: str, backup: BackupSet | None = None) -> Creation:  # noqa: ARG002 - takes in any
        """A folder that nobody has."""
        folder = self.parent.expanduser().absolute() / f"drill-{drill}-{secrets.token_hex(4)}"
        return Creation(Kind.PLAYGROUND, str(folder), socket.gethostname())

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Landing:
        """Start a playground there. Raises `PlaygroundError`, `DrillRemains` when the folder cannot be made."""
        folder = Path(creation.place)
        try:
            folder.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            if folder.parent.stat().st_uid not in {os.getuid(), ROOT}:
                raise DrillRemains(
                    f"{folder.parent} is another user's", hint="Say --work-dir with a folder of your own."
                )
            folder.mkdir(mode=PRIVATE)
            (folder / MARK).write_text(drill)
        except OSError as error:
            raise DrillRemains(f"the folder {folder} cannot be made: {error.strerror}") from None
        cluster = ClusterConfig(pd=(self.host.start(folder / CLUSTER, backup.api_version, self.stores),))
        return Landing(cluster, backup.api_version, claims_of(backup, None, b""))

    def remove(self, creation: Creation, drill: str) -> None:
        """Stop the playground and delete its folder, if the drill's mark is in it and nothing of others."""
        folder = Path(creation.place)
        if creation.host != socket.gethostname():
            raise DrillRemains(f"{folder} is on {creation.host}, and this is another machine")
        try:
            self._remove(folder, drill)
        except OSError as error:
            raise DrillRemains(f"{folder} cannot be removed: {error.strerror}") from None

    def _remove(self, folder: Path, drill: str) -> None:
        if not folder.exists():
            return
        if not _is_marked(folder, drill):
            raise DrillRemains(f"{folder} was not made by drill {drill}: it is left alone")
        if strangers := {each.name for each in folder.iterdir()} - {MARK, CLUSTER}:
            raise DrillRemains(f"{folder} holds {', '.join(sorted(strangers))}, which no drill has made")
        self.host.stop(folder / CLUSTER)
        if (folder / CLUSTER).exists():
            shutil.rmtree(folder / CLUSTER)
        (folder / MARK).unlink(missing_ok=True)  # after the rest: what is half removed is still ours
        folder.rmdir()


def _is_marked(folder: Path, drill: str) -> bool:
    """Whether the folder is the drill's: an empty one was made by it just before it was killed."""
    mark = folder / MARK
    if mark.is_file():
        return mark.read_bytes() in {drill.encode(), b""}
    return not any(folder.iterdir())
