"""Flags of log archives, and of the time that a restore takes from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.cli.backup_flags import URLS, StorageFlags
from tikv_br.cli.command import Flags, flag
from tikv_br.cli.shared import pd_time
from tikv_br.cluster.timestamps import parse_ts
from tikv_br.errors import BackupSetError, StorageError, UsageError

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.point_in_time import PointOptions
    from tikv_br.restore.options import RestoreOptions
    from tikv_br.storage.url import StorageLocation

ALLOW_INEXACT = partial(
    flag,
    False,
    "Accept a time at which the log lacks versions, because the CDC stream was interrupted: keys that were overwritten then may get "
    "an older value, or be missing.",
)
LOG_ID = partial(flag, "default", "Name of the log archive (see `tikv-br log start --log-id`).", metavar="NAME")


class LogSourceFlags(Flags):
    log: str = flag("", f"Log archive to use with the backup: {URLS}.", metavar="URL")
    log_id: str = LOG_ID()

    def source(self, storage: StorageFlags) -> LogSource | None:
        """The log, if there is one. Raises `UsageError`."""
        if not self.log:
            return None
        from tikv_br.archive.log import LogSource

        return LogSource(storage.locate(self.log), self.log_id)


def parse_ts_or_latest(text: str, name: str, now: Callable[[], float] = time.time) -> int:
    """As `parse_ts`; 0 = ``latest``. Raises `UsageError`."""
    return 0 if text == "latest" else parse_ts(text, name, now)


class PointFlags(Flags):
    until: str = flag(
        "",
        "Restore the data as of this time (API V2): latest, a PD timestamp, a time or an age (default: latest with --log or an "
        "incremental backup, else the backup as it is).",
        "--until",
        "--restore-ts",
        metavar="TS|TIME|latest",
    )
    before: str = flag(
        "",
        "As the time to restore to, but no write made at this time or later is included: the rows of 3 s before, as stores give out "
        "timestamps up to 3 s old.",
        metavar="TS|TIME",
    )
    allow_inexact: bool = ALLOW_INEXACT()
    work_storage: str = flag(
        "",
        "URL for the temporary merged backup, which needs the space of a full backup (default: next to the log or, without one, to the "
        "backup).",
        metavar="URL",
    )

    def time(self, cluster: ClusterConfig) -> int:
        """The timestamp of ``--until`` or ``--before``; 0 = the latest. Raises `UsageError`, `ClusterError`."""
        now = partial(pd_time, cluster)
        if self.before:
            return parse_ts(self.before, "--before", now)
        return parse_ts_or_latest(self.until or "latest", "--until", now)

    def options(
        self, restore: RestoreOptions, log: LogSource | None, storage_flags: StorageFlags
    ) -> PointOptions | None:
        """None if the backup is restored as it is: without a time and a log, and if it is not incremental. Raises `UsageError`, `ClusterError`."""
        if not self.until + self.before and log is None and not _is_increment(restore.storage):
            return None
        if self.before and self.until != type(self).until:
            raise UsageError("--until and --before cannot be combined", hint="Pass one of them.")
        ts = self.time(restore.cluster)
        before = ts if self.before else 0
        from tikv_br.point_in_time import PointOptions, just_before

        work = storage_flags.locate(self.work_storage) if self.work_storage else None
        return PointOptions(restore, log, just_before(before) if before else ts, before, self.allow_inexact, work)


class RequiredPointFlags(PointFlags):
    until: str = flag(
        "latest",
        "Time to restore to: latest, a PD timestamp, a time or an age.",
        "--until",
        "--restored-ts",
        metavar="TS|TIME|latest",
    )


def _is_increment(storage: StorageLocation) -> bool:
    """Whether a backup is incremental; False if it cannot be read, which the restore reports."""
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.storage.open import open_store

    try:
        return BackupSet.open(open_store(storage)).is_increment
    except (BackupSetError, StorageError):
        return False
