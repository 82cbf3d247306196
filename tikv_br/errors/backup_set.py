"""Trouble with a backup itself."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class BackupSetError(TikvBrError):
    """Trouble with a backup itself."""


class BackupPathInUse(BackupSetError):
    """The path holds a backup, or one is being written there."""

    exit_code = 30
    default_hint = "Use an empty path for each backup."


class LeaseHeld(BackupPathInUse):
    """Another run holds the path just now."""

    exit_code = 38
    default_hint = "Wait for it with --lock-wait; `tikv-br unlock` ends the lease of a run that is no more."
    retryable = True


class BackupNotFound(BackupSetError):
    """No finished backup at the path."""

    exit_code = 31
    default_hint = "Check the URL; a backup without `backupmeta` was never finished."


class BackupDamaged(BackupSetError):
    """A file of the backup is missing, cut, altered, or not what the backup says."""

    exit_code = 32
    default_hint = "Do not use this backup; restore from another copy."


class BackupUnsupported(BackupSetError):
    """A backup of a kind that cannot be restored by this tool."""

    exit_code = 33
    default_hint = "Only RawKV backups with inline file lists are supported."


class CoverageError(BackupSetError):
    """The files of a backup do not cover its range exactly."""

    exit_code = 34
    default_hint = "The backup was not finished; start it again on an empty path."


class CrypterMismatch(BackupSetError):
    """A backup is encrypted and the key is missing or another one; or it is not, and a key was given."""

    exit_code = 35
    default_hint = "Say --crypter.key-file, with the key that the backup was made with."


class LeaseLost(BackupSetError):
    """The path went to another run, or could not be kept, while we wrote."""

    exit_code = 36
    default_hint = "See who holds it with `tikv-br unlock`; nothing of it was removed. Then run the same command again."


class ResumeRefused(BackupSetError):
    """The unfinished run at the path cannot be gone on with."""

    exit_code = 37
    default_hint = "Say --no-resume to remove what it left and start anew."
