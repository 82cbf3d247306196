"""Trouble with a sync's state, and with etcd, where it may lie."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class SyncError(TikvBrError):
    """Trouble with the state of a sync."""


class SyncFenced(SyncError):
    """Another process has taken over this sync."""

    exit_code = 70
    default_hint = "Nothing to do: the other process goes on from here. Run only one process for each sync."


class SyncStateMismatch(SyncError):
    """The state found is that of another sync: of another source, range or sink."""

    exit_code = 71
    default_hint = "Use another --id or --state-dir for each sync, or the flags that this one was begun with."


class SyncStateDamaged(SyncError):
    """The state of a sync cannot be read."""

    exit_code = 72
    default_hint = "Begin anew from a backup, with another --id; `tikv-br diff` shows what the target lacks."


class ChangefeedNotFound(SyncError):
    """There is no changefeed of that name."""

    exit_code = 73
    default_hint = "`tikv-br changefeed list` shows them: with --pd and --etcd as it was created."


class ChangefeedExists(SyncError):
    """There is a changefeed, or a sync, of that name already."""

    exit_code = 74
    default_hint = "Choose another --id; `tikv-br changefeed list` shows those that are taken."


class ChangefeedBusy(SyncError):
    """A changefeed is not in the state for what was asked, or another process changes it."""

    exit_code = 75
    default_hint = "See `tikv-br changefeed query`, then say it again."


class EtcdError(TikvBrError):
    """Trouble with etcd, where syncs keep their state."""


class EtcdUnreachable(EtcdError):
    """No member of etcd answers."""

    exit_code = 80
    default_hint = "Check --etcd, that most members are up and that no firewall is between."
    retryable = True

    def __init__(self, message: str, *, hint: str | None = None, outcome_unknown: bool = False) -> None:
        """`outcome_unknown`: the request may have taken effect, or may yet."""
        super().__init__(message, hint=hint)
        self.outcome_unknown = outcome_unknown


class EtcdRefused(EtcdError):
    """Etcd refused a request for good."""

    exit_code = 81
    default_hint = "The message is etcd's own; check --etcd, and there the user, the rights, the password."


class EtcdLeaseExpired(EtcdError):
    """Our lease in etcd has ended, or may have: others may do our work now."""

    exit_code = 82
    default_hint = "Nothing to do where others took over; else check etcd's health and this machine's load."
