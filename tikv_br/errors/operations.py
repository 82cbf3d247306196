"""Errors of backups, logs, restores and syncs, and results of commands that worked and found a problem."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class BackupSetError(TikvBrError):
    """Base of the errors of a backup."""


class BackupPathInUse(BackupSetError):
    """The path holds a backup, or one is being written there."""

    exit_code = 30
    default_hint = "Use an empty path for each backup."


class LeaseHeld(BackupPathInUse):
    """Another run holds the lock of the path."""

    exit_code = 38
    default_hint = "Wait for the run with --lock-wait. The lock of a dead run expires within two minutes; `tikv-br backup unlock` removes that of a backup at once."
    retryable = True


class BackupNotFound(BackupSetError):
    """There is no finished backup at the path."""

    exit_code = 31
    default_hint = "Check the URL. A backup without `backupmeta` is unfinished."


class BackupDamaged(BackupSetError):
    """A file of the backup is missing, truncated, altered, or not what the backup recorded."""

    exit_code = 32
    default_hint = "Do not use this backup. Restore from another copy."


class BackupUnsupported(BackupSetError):
    """A backup of a kind that tikv-br cannot restore."""

    exit_code = 33
    default_hint = "Supported are backups of RawKV data, and full backups of TxnKV data, with inline file lists."


class CoverageError(BackupSetError):
    """The files of a backup do not cover its range exactly."""

    exit_code = 34
    default_hint = "The backup is incomplete: run it again with --no-resume, or use another one."


class CrypterMismatch(BackupSetError):
    """An encrypted backup was opened without its key, or an unencrypted one with a key."""

    exit_code = 35
    default_hint = "Pass --crypter.key-file with the key that the backup was made with."


class LeaseLost(BackupSetError):
    """The lock of the path was lost to another run, or could not be renewed, while this run was writing."""

    exit_code = 36
    default_hint = "Nothing was removed. Make sure that no other run works there, then run the same command again."


class ResumeRefused(BackupSetError):
    """The unfinished run at the path cannot be resumed."""

    exit_code = 37
    default_hint = "Pass --no-resume to remove its files and start over."


class LogDamaged(BackupSetError):
    """A log archive lacks changes, or one of its objects is missing, truncated or altered."""

    exit_code = 39
    default_hint = "Restore to a time before the gap. Take a new full backup: a later one does not need these changes."


class TargetNotEmpty(TikvBrError):
    """The target range already holds data."""

    exit_code = 40
    default_hint = (
        "Restore into an empty range. With --allow-overwrite, rows that the backup does not have stay: transactional data are then "
        "no snapshot, which can break the programs that use them."
    )


class ChecksumMismatch(TikvBrError):
    """The cluster's data differs from the backup's."""

    exit_code = 41
    default_hint = (
        "Do not use the target before the cause is known. Check for writes or expired keys since the operation began."
    )


class DrillRemains(TikvBrError):
    """A drill found something that it must not overwrite or remove: it may belong to somebody else."""

    exit_code = 42
    default_hint = "It was left unchanged. Check it, and remove it yourself if it is not needed."


class OutsideRestoreWindow(TikvBrError):
    """Backups and log do not have the rows of the requested time."""

    exit_code = 43
    default_hint = "`tikv-br show` prints the window of a backup with a log."


class DifferencesFound(TikvBrError):
    """The compared data differs."""

    exit_code = 60
    default_hint = "The output lists the ranges and keys. `--repair` corrects them in the second cluster."


class ProbesFailed(TikvBrError):
    """A probe of `check` failed."""

    exit_code = 61
    default_hint = "Follow the advice next to each failed probe, then run the check again."


class ObjectivesMissed(TikvBrError):
    """A drill's recovery succeeded, but missed an objective."""

    exit_code = 62
    default_hint = "The report shows how each figure was measured and how long each step took."


class DamageNotFound(TikvBrError):
    """A drill damaged a copy of a backup, and the damage was not detected."""

    exit_code = 63
    default_hint = "This is a bug in tikv-br. Please report it, with the drill's report."


class CutOverFailed(TikvBrError):
    """The cut-over of a drill failed."""

    exit_code = 65
    default_hint = "Check the lag of a sync from this source; docs/monitoring.md describes what it depends on."


class NothingMatched(TikvBrError):
    """The requested range, prefix or keyspace has no row: nothing was written."""

    exit_code = 66
    default_hint = "Check the bounds, the keyspace and the cluster. If there is to be no row, pass --allow-empty."


class HandOverNotRefused(TikvBrError):
    """A drill advanced GC past a backup, and a sync from it was not refused."""

    exit_code = 64
    default_hint = "This is a bug in tikv-br. Please report it, with the drill's report."


class SyncFenced(TikvBrError):
    """Another process has taken over this sync."""

    exit_code = 70
    default_hint = "Nothing to do: the other process continues the sync. Run only one process per sync."


class SyncRunning(TikvBrError):
    """A sync or log archive with the same name is running."""

    exit_code = 78
    default_hint = "Stop it first."


class SyncStateMismatch(TikvBrError):
    """The state belongs to a sync with another source, range or sink."""

    exit_code = 71
    default_hint = "Use a separate --id or --state-dir for each sync, or the flags that this one was started with."


class SyncStateDamaged(TikvBrError):
    """The state of a sync cannot be read."""

    exit_code = 72
    default_hint = "Start over from a backup, with another --id. `tikv-br diff` shows what the target lacks."


class ChangefeedNotFound(TikvBrError):
    """No changefeed has that id."""

    exit_code = 73
    default_hint = (
        "`tikv-br changefeed list` lists them. Pass the --pd and --etcd that the changefeed was created with."
    )


class ChangefeedExists(TikvBrError):
    """A changefeed or sync has that id already."""

    exit_code = 74
    default_hint = "Choose another --id. `tikv-br changefeed list` lists those in use."


class ChangefeedBusy(TikvBrError):
    """The changefeed's state does not allow the operation, or another process is changing it."""

    exit_code = 75
    default_hint = "Check its state with `tikv-br changefeed query`, then run the same command again."


class SyncDegraded(TikvBrError):
    """The source got rows by an ingest that keeps their timestamps, which no change feed delivers: the sink lacks them."""

    exit_code = 76
    default_hint = "Repair the sink with `tikv-br diff --repair`, or seed it again. Then start with another --id from a timestamp after the ingest."


LOG_DEGRADED = (
    "Take a full backup after the ingest, and start another log from it: `tikv-br log start --from-backup URL` with another --log-id. "
    "From this log, no time after the ingest can be restored whole; earlier times can."
)
"""The hint of `SyncDegraded` for a log archive, which nothing can repair."""
