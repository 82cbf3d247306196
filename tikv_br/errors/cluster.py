"""Trouble with PD or the stores."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


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
    retryable = True


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
