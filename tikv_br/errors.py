"""Every error that tikv-br can exit with: one class per cause, each with its exit code and a default hint.

Of the command line and this machine; of backups, logs, restores and syncs; of servers and storages. Some are results of commands that
worked and found a problem. ``docs/exit-codes.md`` is generated from these classes.
"""

from __future__ import annotations

from typing import ClassVar


class Failure(BaseException):
    """How a command ends without success, by an error or a signal: ``message`` is what failed and why, ``hint`` what to do next.

    ``retryable`` is set per class: whether the same call may succeed a moment later.
    """

    exit_code: ClassVar[int]
    default_hint: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the hint, so that a Spark task's error reaches the driver unchanged."""
        return (_rebuild, (type(self), self.message, self.hint))

    @property
    def name(self) -> str:
        """Name of the class in docs/exit-codes.md; a package's private subclass has its base's name."""
        return next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__)

    def to_json(self) -> dict[str, object]:
        """The ``exit_error`` line of ``--output json``."""
        return {
            "message_type": "exit_error",
            "code": self.exit_code,
            "name": self.name,
            "message": self.message,
            "hint": self.hint,
        }


def _rebuild(cls: type[Failure], message: str, hint: str) -> Failure:
    return cls(message, hint=hint)


class TikvBrError(Failure, Exception):
    """Base of all errors."""

    exit_code = 1
    default_hint = "Run the command again with --log-level debug. If the error persists, report it with the log."


class Stopped(Failure):
    """A signal ended the command. No `Exception`, as it may come inside of code, such as of logging, that survives all of those."""


class UsageError(TikvBrError):
    """A flag or an input file is invalid."""

    exit_code = 2
    default_hint = "See --help for the accepted values."


class SparkUnavailable(TikvBrError):
    """Java or Spark is missing or does not start."""

    exit_code = 50
    default_hint = "Install Java 17 or newer, set JAVA_HOME, and check --spark-master."


class TaskFailed(TikvBrError):
    """A task failed permanently."""

    exit_code = 51


class SparkWorkerUnfit(TikvBrError):
    """The Python of a Spark worker lacks tikv-br or a package, or has another version of Python or tikv-br."""

    exit_code = 55
    default_hint = "Run `tikv-br spark pack FILE` with this Python and pass --spark-archive FILE, or install the same versions on every worker."


class MachineUnfit(TikvBrError):
    """This machine lacks what the command needs, such as memory, open files or a directory for temporary files."""

    exit_code = 56
    default_hint = "Raise the limits of this process, and check the directories that it uses."


class PlaygroundError(TikvBrError):
    """The playground cannot do the operation."""

    exit_code = 53
    default_hint = "See `tikv-br playground list` and the log in the playground's directory."


class OutputFailed(TikvBrError):
    """Standard output cannot be written, for example on a full disk."""

    exit_code = 54
    default_hint = (
        "The operation took effect, but its result was not printed. Free some space for the output, and see the log."
    )


class Interrupted(Stopped):
    """The user interrupted the command (SIGINT)."""

    exit_code = 130
    default_hint = "Run the same command again when you are ready."


class OutputClosed(TikvBrError):
    """The reader of standard output has exited (SIGPIPE)."""

    exit_code = 141
    default_hint = "Nothing to do if the reader stopped on purpose, as `head` does."


class Terminated(Stopped):
    """The command was terminated (SIGTERM)."""

    exit_code = 143
    default_hint = "Run the same command again when you are ready."


class BackupSetError(TikvBrError):
    """Base of the errors of a backup."""


class BackupPathInUse(BackupSetError):
    """The path holds a backup, or one is being written there."""

    exit_code = 30
    default_hint = "Use an empty path for each backup."


class LeaseHeld(BackupPathInUse):
    """Another run holds the lock of the path."""

    exit_code = 38
    default_hint = "Wait for the run with --lock-wait. The lock of a dead run expires within two minutes; `tikv-br backup unlock` removes the lock of a backup at once."
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
    default_hint = "Restore into an empty range, cluster or keyspace, or pass --allow-overwrite: rows that the backup does not have then stay."


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
    default_hint = (
        "Pass --keyspace NAME or --keyspace all if the rows are in other keyspaces (API V2), and check the bounds and the cluster. "
        "If there is to be no row, pass --allow-empty."
    )


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
    """The state is of a sync with another source, range or sink, or rows were copied back since."""

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


class ClusterError(TikvBrError):
    """Base of the errors of PD and the stores."""


class ClusterUnreachable(ClusterError):
    """PD or a store does not answer."""

    exit_code = 3
    default_hint = "Check the address, that the servers are running, and that no firewall blocks them."
    retryable = True


class ClusterTlsError(ClusterError):
    """The TLS handshake with PD or a store failed."""

    exit_code = 4
    default_hint = "Check --ca, --cert and --key: the issuing authority, the expiry dates and the host names."


class ClusterUnfit(ClusterError):
    """The cluster's version or mode does not support the operation."""

    exit_code = 5
    default_hint = "Use a cluster whose version and mode support the operation."


class ApiVersionMismatch(ClusterUnfit):
    """The API versions of backup and cluster differ."""

    exit_code = 6
    default_hint = (
        "Use a cluster with the backup's API version. Raw data can also be backed up with another --dst-api-version."
    )


class ConversionUnsupported(ClusterUnfit):
    """This conversion is impossible, or would lose data."""

    exit_code = 7
    default_hint = "Choose a --dst-api-version that keeps all data: the source's own version or a newer one."


class RetryBudgetExhausted(ClusterError):
    """The cluster kept returning errors until the retry budget was spent."""

    exit_code = 8
    default_hint = "Check the cluster's health, then run the same command again."
    retryable = True


class StoreFull(RetryBudgetExhausted):
    """The disk of a store stayed full until the retry budget was spent."""

    exit_code = 15
    default_hint = (
        "Free space on the disk of this store, or add stores and let PD balance, then run the same command again."
    )


class RequestRefused(ClusterError):
    """The server rejected a request; a retry would not help."""

    exit_code = 9
    default_hint = "The message comes from the server. Correct the request accordingly."


class SafePointError(ClusterError):
    """GC has passed, or would pass, data that the operation needs."""

    exit_code = 10
    default_hint = "Changes since this timestamp may be gone. Start again from a new backup, with a --gc-ttl that lasts until its next use."


class TimestampAheadOfTso(ClusterError):
    """Restored data has timestamps above the target's TSO and would shadow later writes."""

    exit_code = 11
    default_hint = "Check the clocks of both clusters. Wait until the target's TSO has passed the backup's, or pass --restamp auto."


class DangerousRequest(ClusterError):
    """A request that would crash a store; it was not sent."""

    exit_code = 12
    default_hint = "This is a bug in tikv-br. Please report it."


class KeyNotFound(ClusterError):
    """The requested key does not exist, or has expired."""

    exit_code = 13
    default_hint = "Check the key and --key-format. `tikv-br raw scan` lists existing keys."


class SafePointInUse(ClusterError):
    """A run still renews the service safe point that was to be removed."""

    exit_code = 14
    default_hint = "Stop the run first; a backup, and `tikv-br log end` or `changefeed remove`, remove their safe point themselves."


class ClusterFollowed(ClusterError):
    """Followers of the cluster would not notice the rows that stores ingest: TiKV-CDC, or an older tikv-br."""

    exit_code = 16
    default_hint = (
        "Stop and remove them, and seed their targets again afterwards. Or write by puts (--mode put), which every follower sees. "
        "With --allow-followers their targets will lack these rows. The safe point of a changefeed that was removed stays until it "
        "expires; `tikv-br gc release SERVICE` removes it at once."
    )


class LocksRemain(ClusterError):
    """Live transactions hold locks that a backup at its timestamp cannot pass."""

    exit_code = 17
    default_hint = "Run the same command again once these transactions have ended, or let a backup wait longer with --lock-patience. If their clients are gone, the locks are resolved after their TTL."


class StorageError(TikvBrError):
    """Base of the errors of the storage."""


class StorageUnreachable(StorageError):
    """The storage does not answer."""

    exit_code = 20
    default_hint = "Check the URL, the endpoint and the network."
    retryable = True


class StorageDenied(StorageError):
    """The storage denied access: wrong credentials, or too few permissions."""

    exit_code = 21
    default_hint = "Check the credentials, the bucket policy and the path."


class StorageFull(StorageError):
    """The storage has no space left."""

    exit_code = 22
    default_hint = "Free some space or choose another --storage, then start again."


class StorageReadOnly(StorageError):
    """The storage is read-only."""

    exit_code = 23
    default_hint = "Choose a --storage that this user can write to."


class StorageObjectMissing(StorageError):
    """An object that must exist does not."""

    exit_code = 24
    default_hint = "Check the path, and list it with the storage's own tools."


class StorageConflict(StorageError):
    """An object that must not exist does: another run has written it."""

    exit_code = 25
    default_hint = "Another run may be writing to the same path. Use a separate path for each backup."


class StorageNotRegular(StorageError):
    """A symbolic link, pipe, socket or device is where the storage should have a file or a directory."""

    exit_code = 26
    default_hint = "Remove it if you did not put it there. Below its path a local storage follows no links; the path itself may be one."


class EtcdError(TikvBrError):
    """Base of the errors of etcd, where syncs can keep their state."""


class EtcdUnreachable(EtcdError):
    """No member of etcd answers."""

    exit_code = 80
    default_hint = "Check --etcd, that a majority of the members is running, and that no firewall blocks them."
    retryable = True

    def __init__(self, message: str, *, hint: str | None = None, outcome_unknown: bool = False) -> None:
        """`outcome_unknown`: the request may have taken effect, or may yet."""
        super().__init__(message, hint=hint)
        self.outcome_unknown = outcome_unknown


class EtcdRefused(EtcdError):
    """Etcd rejected a request; a retry would not help."""

    exit_code = 81
    default_hint = "The message comes from etcd. Check --etcd and, in etcd, the user's name, permissions and password."


class EtcdLeaseExpired(EtcdError):
    """This process's lease in etcd has expired, or may have: other processes may do its work now."""

    exit_code = 82
    default_hint = (
        "If another process took over, there is nothing to do. Otherwise check etcd's health and this machine's load."
    )


class KafkaError(TikvBrError):
    """Base of the errors of Kafka."""


class KafkaUnreachable(KafkaError):
    """No Kafka broker answers, or none that can take the messages."""

    exit_code = 83
    default_hint = "Check the addresses, that the brokers are running, that each partition has a leader, and that no firewall blocks them."
    retryable = True


class KafkaDenied(KafkaError):
    """Kafka refused the credentials, or an ACL forbids the operation."""

    exit_code = 84
    default_hint = (
        "Check sasl-mechanism, user and password, and that an ACL allows this user the operation on the topic."
    )


class KafkaRefused(KafkaError):
    """Kafka cannot do what was requested; a retry would not help."""

    exit_code = 85
    default_hint = "The message comes from Kafka. Correct the address, its parameters or the topic accordingly."


class TopicDamaged(KafkaError):
    """A topic lacks changes, or one of its messages cannot be replayed."""

    exit_code = 86
    default_hint = "Check that protocol, encoding and limits in the address are those that the topic is written with."


class TopicUnresolved(KafkaError):
    """A topic has changes, but not the resolved-ts that would allow to apply them."""

    exit_code = 87
    default_hint = "Check that the sync or changefeed that writes the topic runs, then run the same command again."
