"""Errors of PD and the stores, of storages, of etcd and of Kafka."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


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
