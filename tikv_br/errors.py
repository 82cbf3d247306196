"""Every error that tikv-br can end with: one class a cause, each with its exit code and a hint.

The tree (indentation = inheritance; the number is the exit code)::

    TikvBrError                       1   anything that has no better class
      UsageError                      2   a flag or an input file is wrong
      ClusterError
        ClusterUnreachable            3   PD or a store does not answer
        ClusterTlsError               4   certificate refused, by us or by them
        ClusterUnfit                  5   version or mode of the cluster does not fit the work
          ApiVersionMismatch          6   the API version of backup and cluster differ
          ConversionUnsupported       7   this conversion cannot be done, or would lose data
        RetryBudgetExhausted          8   the cluster kept answering with errors until the budget was spent
        RequestRefused                9   the server refused a request for good
        SafePointError               10   GC has passed, or would pass, the data we need
        TimestampAheadOfTso          11   restored data would shadow later writes
        DangerousRequest             12   a request that would kill a store; never sent
        KeyNotFound                  13   the key asked for does not exist
      StorageError
        StorageUnreachable           20   the object store does not answer
        StorageDenied                21   credentials or rights do not suffice
        StorageFull                  22   no space left
        StorageReadOnly              23   the place cannot be written
        StorageObjectMissing         24   an object that must exist does not
        StorageConflict              25   an object that must not exist does
      BackupSetError
        BackupPathInUse              30   the path holds a backup, or one is being written there
          LeaseHeld                  38   another run holds the path just now
        BackupNotFound               31   no finished backup at the path
        BackupDamaged                32   a file is missing, cut, altered or not what the backup says
        BackupUnsupported            33   a backup of a kind we cannot restore
        CoverageError                34   the files of a backup do not cover its range exactly
        CrypterMismatch              35   a backup is encrypted, and not with the given key
        LeaseLost                    36   the path went to another run while we wrote
        ResumeRefused                37   the unfinished run at the path was begun with other parameters
      RestoreError
        TargetNotEmpty               40   the target range already holds data
        ChecksumMismatch             41   the cluster's data differ from the backup's
      FoundSomething
        DifferencesFound             60   what was compared is not equal
        ProbesFailed                 61   a probe of `check` has failed
      RuntimeEnvironmentError
        SparkUnavailable             50   Java or Spark is missing or does not start
        TaskFailed                   51   a task failed for good
        PackageClash                 52   another package hides one of ours
        PlaygroundError              53   the playground cannot do what was asked
      Interrupted                   130   SIGINT
      OutputClosed                  141   the reader of our output has gone (SIGPIPE)
      Terminated                    143   SIGTERM

Docs: ``docs/exit-codes.md`` is generated from these classes.
"""

from __future__ import annotations

from typing import ClassVar


class TikvBrError(Exception):
    """Base of all errors: ``message`` says what is wrong, ``hint`` what to do next.

    ``retryable`` is a property of the class: whether the same call may succeed a moment later.
    """

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "Run again with --log-level debug and report the log if it persists."
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the hint, so that an error survives the way from a Spark task to the driver."""
        return (_rebuild, (type(self), self.message, self.hint))

    def to_json(self) -> dict[str, object]:
        """The ``exit_error`` line of ``--output json``."""
        return {
            "message_type": "exit_error",
            "code": self.exit_code,
            "name": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
        }


def _rebuild(cls: type[TikvBrError], message: str, hint: str) -> TikvBrError:
    return cls(message, hint=hint)


class UsageError(TikvBrError):
    """A flag or an input file is wrong."""

    exit_code = 2
    default_hint = "See --help for the flag's form."


class ClusterError(TikvBrError):
    """Trouble with PD or the stores."""


class ClusterUnreachable(ClusterError):
    """PD or a store does not answer."""

    exit_code = 3
    default_hint = "Check the address, that the servers are up and that no firewall is between."
    retryable = True


class ClusterTlsError(ClusterError):
    """The TLS handshake with PD or a store failed."""

    exit_code = 4
    default_hint = "Check --ca, --cert and --key: the right authority, not expired, and names that match."


class ClusterUnfit(ClusterError):
    """Version or mode of the cluster does not fit the work."""

    exit_code = 5
    default_hint = "Use a cluster whose version and mode fit, or another operation."


class ApiVersionMismatch(ClusterUnfit):
    """The API versions of backup and cluster differ."""

    exit_code = 6
    default_hint = "Restore into a cluster of the backup's API version, or back up with another --dst-api-version."


class ConversionUnsupported(ClusterUnfit):
    """This conversion cannot be done, or would lose data."""

    exit_code = 7
    default_hint = "Choose a --dst-api-version that keeps all data: the source's own, or a newer one."


class RetryBudgetExhausted(ClusterError):
    """The cluster kept answering with errors until the retry budget was spent."""

    exit_code = 8
    default_hint = "Look at the cluster's health, then run the same command again."


class RequestRefused(ClusterError):
    """The server refused a request for good."""

    exit_code = 9
    default_hint = "The message is the server's own; check the request against it."


class SafePointError(ClusterError):
    """GC has passed, or would pass, data that the work needs."""

    exit_code = 10
    default_hint = "Raise the GC life time or take a later timestamp, then start again."


class TimestampAheadOfTso(ClusterError):
    """Restored data carry timestamps above the target's TSO and would shadow later writes."""

    exit_code = 11
    default_hint = (
        "Check the clocks of both clusters; wait until the target's TSO has passed the backup's, or say --restamp."
    )


class DangerousRequest(ClusterError):
    """A request that would kill a store; it was not sent."""

    exit_code = 12
    default_hint = "This is a defect of tikv-br: please report it."


class KeyNotFound(ClusterError):
    """The key asked for does not exist, or has expired."""

    exit_code = 13
    default_hint = "Check the key and --format; `tikv-br raw scan` shows what is there."


class StorageError(TikvBrError):
    """Trouble with the object store."""


class StorageUnreachable(StorageError):
    """The object store does not answer."""

    exit_code = 20
    default_hint = "Check the URL, the endpoint and the network."
    retryable = True


class StorageDenied(StorageError):
    """Credentials or rights do not suffice."""

    exit_code = 21
    default_hint = "Check the credentials, the bucket's policy and the path."


class StorageFull(StorageError):
    """No space left at the storage."""

    exit_code = 22
    default_hint = "Free space or choose another --storage, then start again."


class StorageReadOnly(StorageError):
    """The storage cannot be written."""

    exit_code = 23
    default_hint = "Choose a --storage that this user may write."


class StorageObjectMissing(StorageError):
    """An object that must exist does not."""

    exit_code = 24
    default_hint = "Check the path; see what is there with the storage's own tools."


class StorageConflict(StorageError):
    """An object that must not exist does: another run was faster."""

    exit_code = 25
    default_hint = "Another run may be writing to the same path; use a path of its own for each backup."


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


class RestoreError(TikvBrError):
    """Trouble with the target of a restore."""


class TargetNotEmpty(RestoreError):
    """The target range already holds data."""

    exit_code = 40
    default_hint = "Restore into an empty range, or say --allow-overwrite."


class ChecksumMismatch(RestoreError):
    """The cluster's data differ from the backup's."""

    exit_code = 41
    default_hint = "Do not use the target before the cause is known: were there writes or expired keys meanwhile?"


class FoundSomething(TikvBrError):
    """A command that looks for trouble did its work, and found some."""


class DifferencesFound(FoundSomething):
    """What was compared is not equal."""

    exit_code = 60
    default_hint = "The ranges and keys are listed; `--repair` puts them right in the second."


class ProbesFailed(FoundSomething):
    """A probe of `check` has failed."""

    exit_code = 61
    default_hint = "Do what stands beside the failed probes, then check again."


class RuntimeEnvironmentError(TikvBrError):
    """Something that the tool needs on this machine is missing or broken."""


class SparkUnavailable(RuntimeEnvironmentError):
    """Java or Spark is missing or does not start."""

    exit_code = 50
    default_hint = "Install Java 17 or newer, set JAVA_HOME, and check --spark-master."


class TaskFailed(RuntimeEnvironmentError):
    """A task failed for good."""

    exit_code = 51


class PackageClash(RuntimeEnvironmentError):
    """Another installed package hides one of ours."""

    exit_code = 52
    default_hint = "Install tikv-br into an environment of its own, with `uv tool install` or `pipx install`."


class PlaygroundError(RuntimeEnvironmentError):
    """The playground cannot do what was asked."""

    exit_code = 53
    default_hint = "See `tikv-br playground list` and the log in the playground's directory."


class Interrupted(TikvBrError):
    """The user interrupted the command (SIGINT)."""

    exit_code = 130
    default_hint = "Run the same command again when you are ready."


class OutputClosed(TikvBrError):
    """Whoever read our standard output has gone (SIGPIPE)."""

    exit_code = 141
    default_hint = "Nothing to do where the reader stopped on purpose, as `head` does."


class Terminated(TikvBrError):
    """The command was told to end (SIGTERM)."""

    exit_code = 143
    default_hint = "Run the same command again when you are ready."
