"""A playground as target: a cluster on this machine that is started for the drill."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.ledger import Creation, EntryKind
from tikv_br.drill.report import EMULATOR
from tikv_br.drill.targets import Destination
from tikv_br.errors import DrillRemains
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Reporter, silent
from tikv_br.report.facts import counted

MARK = "made-by-drill"
"""A file in each playground directory that a drill made; it holds the drill's id."""
PRIVATE = 0o700
"""Restored data may only be read by this user."""
ROOT = 0
_NAME = re.compile(r"[0-9a-f]{8}")
CLUSTER = "cluster"
"""The playground's own directory, beside the mark."""


class PlaygroundHost(Protocol):
    """Starts and stops playgrounds. The command line provides it: no other package may import the playground."""

    def start_detached(self, folder: Path, api_version: ApiVersion, stores: int, /) -> str:
        """Start one that outlives this process; returns its PD address."""

    def stop(self, folder: Path, /) -> object:
        """Stop the one in a directory, if it runs."""


@dataclass(frozen=True, slots=True)
class PlaygroundTarget:
    """A cluster on this machine that is started for the drill."""

    host: PlaygroundHost
    parent: Path
    """Each playground gets a directory of its own in this one."""
    stores: int = 3

    @property
    def name(self) -> str:
        return f"{EMULATOR} of {counted(self.stores, 'store')}"

    def plan(self, drill: str, backup: BackupSet | None = None, reporter: Reporter = silent) -> Creation:  # noqa: ARG002 - takes any backup
        """A directory that does not exist yet."""
        folder = self.parent.expanduser().absolute() / f"drill-{drill}-{secrets.token_hex(4)}"
        return Creation(EntryKind.PLAYGROUND, str(folder), socket.gethostname())

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Destination:
        """Start a playground there. Raises `PlaygroundError`, `DrillRemains` if the directory cannot be made."""
        folder = Path(creation.place)
        try:
            folder.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            if folder.parent.stat().st_uid not in {os.getuid(), ROOT}:
                raise DrillRemains(
                    f"{folder.parent} belongs to another user", hint="Pass --work-dir with a directory of your own."
                )
            folder.mkdir(mode=PRIVATE)
            (folder / MARK).write_text(drill)
        except OSError as error:
            raise DrillRemains(f"cannot make the directory {folder}: {error.strerror}") from None
        cluster = ClusterConfig(pd=(self.host.start_detached(folder / CLUSTER, backup.api_version, self.stores),))
        return Destination(cluster, backup.api_version, tuple(sorted(backup.ranges)))

    def remove(self, creation: Creation, drill: str) -> None:
        """Stop the playground and delete its directory, if it is this user's, in ``parent``, with the drill's mark and nothing else."""
        folder = Path(creation.place)
        if creation.host != socket.gethostname():
            raise DrillRemains(f"{folder} is on {creation.host}, not on this machine")
        parent = self.parent.expanduser().absolute()
        if folder.parent != parent or not _NAME.fullmatch(folder.name.removeprefix(f"drill-{drill}-")):
            raise DrillRemains(
                f"{folder} is not a directory that drill {drill} makes in {parent}",
                hint=f"If a drill made it, run one with --work-dir {folder.parent}. Otherwise delete ledger/{drill}.json below --reports.",
            )
        try:
            self._remove(folder, drill)
        except OSError as error:
            raise DrillRemains(f"cannot remove {folder}: {error.strerror}") from None

    def _remove(self, folder: Path, drill: str) -> None:
        if not os.path.lexists(folder):
            return
        if not _is_own(folder) or not _has_mark(folder, drill):
            raise DrillRemains(f"{folder} was not made by drill {drill}: it is left alone")
        if strangers := {each.name for each in folder.iterdir()} - {MARK, CLUSTER}:
            raise DrillRemains(f"{folder} contains {', '.join(sorted(strangers))}, which no drill made")
        self.host.stop(folder / CLUSTER)
        if (folder / CLUSTER).exists():
            shutil.rmtree(folder / CLUSTER)
        (folder / MARK).unlink(missing_ok=True)  # last: a half-removed directory is still the drill's
        folder.rmdir()


def _is_own(folder: Path) -> bool:
    """Return whether it is a directory, no link, in which only this user can have put anything."""
    found, above = folder.lstat(), folder.parent.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.getuid() and above.st_uid in {os.getuid(), ROOT} and not found.st_mode & others


def _has_mark(folder: Path, drill: str) -> bool:
    """An empty directory counts: the drill was killed right after it made it."""
    mark = folder / MARK
    if mark.is_file() and not mark.is_symlink():
        return mark.read_bytes() in {drill.encode(), b""}
    return not any(folder.iterdir())
