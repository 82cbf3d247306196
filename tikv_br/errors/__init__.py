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
        DrillRemains                 42   what a drill was to make or remove is, or may be, another's
      FoundSomething
        DifferencesFound             60   what was compared is not equal
        ProbesFailed                 61   a probe of `check` has failed
        ObjectivesMissed             62   a drill's recovery worked, and missed what was asked of it
        DamageNotFound               63   a drill damaged a copy of a backup, and it was not found
        HandOverNotRefused           64   a drill let GC pass a backup, and a sync from it would begin
        CutOverFailed                65   a cut-over that a drill rehearsed did not come about
      SyncError
        SyncFenced                   70   another process has taken over this sync
        SyncStateMismatch            71   the state is that of another sync
        SyncStateDamaged             72   the state cannot be read
        ChangefeedNotFound           73   there is no changefeed of that name
        ChangefeedExists             74   there is one already
        ChangefeedBusy               75   a changefeed is not in the state for what was asked
      EtcdError
        EtcdUnreachable              80   no member of etcd answers
        EtcdRefused                  81   etcd refused a request for good
        EtcdLeaseExpired             82   our lease in etcd has ended, or may have
      RuntimeEnvironmentError
        SparkUnavailable             50   Java or Spark is missing or does not start
        TaskFailed                   51   a task failed for good
        PackageClash                 52   another package hides one of ours
        PlaygroundError              53   the playground cannot do what was asked
        OutputFailed                 54   our output cannot be written
      Interrupted                   130   SIGINT
      OutputClosed                  141   the reader of our output has gone (SIGPIPE)
      Terminated                    143   SIGTERM

Docs: ``docs/exit-codes.md`` is generated from these classes.
"""

from __future__ import annotations

from tikv_br.errors.backup_set import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    BackupSetError,
    BackupUnsupported,
    CoverageError,
    CrypterMismatch,
    LeaseHeld,
    LeaseLost,
    ResumeRefused,
)
from tikv_br.errors.base import (
    TikvBrError,
    UsageError,
)
from tikv_br.errors.cluster import (
    ApiVersionMismatch,
    ClusterError,
    ClusterTlsError,
    ClusterUnfit,
    ClusterUnreachable,
    ConversionUnsupported,
    DangerousRequest,
    KeyNotFound,
    RequestRefused,
    RetryBudgetExhausted,
    SafePointError,
    TimestampAheadOfTso,
)
from tikv_br.errors.environment import (
    Interrupted,
    OutputClosed,
    OutputFailed,
    PackageClash,
    PlaygroundError,
    RuntimeEnvironmentError,
    SparkUnavailable,
    TaskFailed,
    Terminated,
)
from tikv_br.errors.storage import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageReadOnly,
    StorageUnreachable,
)
from tikv_br.errors.sync import (
    ChangefeedBusy,
    ChangefeedExists,
    ChangefeedNotFound,
    EtcdError,
    EtcdLeaseExpired,
    EtcdRefused,
    EtcdUnreachable,
    SyncError,
    SyncFenced,
    SyncStateDamaged,
    SyncStateMismatch,
)
from tikv_br.errors.target import (
    ChecksumMismatch,
    CutOverFailed,
    DamageNotFound,
    DifferencesFound,
    DrillRemains,
    FoundSomething,
    HandOverNotRefused,
    ObjectivesMissed,
    ProbesFailed,
    RestoreError,
    TargetNotEmpty,
)

__all__ = [
    "ApiVersionMismatch",
    "BackupDamaged",
    "BackupNotFound",
    "BackupPathInUse",
    "BackupSetError",
    "BackupUnsupported",
    "ChangefeedBusy",
    "ChangefeedExists",
    "ChangefeedNotFound",
    "ChecksumMismatch",
    "ClusterError",
    "ClusterTlsError",
    "ClusterUnfit",
    "ClusterUnreachable",
    "ConversionUnsupported",
    "CoverageError",
    "CrypterMismatch",
    "CutOverFailed",
    "DamageNotFound",
    "DangerousRequest",
    "DifferencesFound",
    "DrillRemains",
    "EtcdError",
    "EtcdLeaseExpired",
    "EtcdRefused",
    "EtcdUnreachable",
    "FoundSomething",
    "HandOverNotRefused",
    "Interrupted",
    "KeyNotFound",
    "LeaseHeld",
    "LeaseLost",
    "ObjectivesMissed",
    "OutputClosed",
    "OutputFailed",
    "PackageClash",
    "PlaygroundError",
    "ProbesFailed",
    "RequestRefused",
    "RestoreError",
    "ResumeRefused",
    "RetryBudgetExhausted",
    "RuntimeEnvironmentError",
    "SafePointError",
    "SparkUnavailable",
    "StorageConflict",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageObjectMissing",
    "StorageReadOnly",
    "StorageUnreachable",
    "SyncError",
    "SyncFenced",
    "SyncStateDamaged",
    "SyncStateMismatch",
    "TargetNotEmpty",
    "TaskFailed",
    "Terminated",
    "TikvBrError",
    "TimestampAheadOfTso",
    "UsageError",
]
