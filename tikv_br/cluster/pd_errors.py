"""The errors of PD: in the headers of its answers, and of servers that are not PD."""

from __future__ import annotations

from collections.abc import Mapping

from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, RequestRefused

HEADER_ERRORS: Mapping[int, type[ClusterError]] = {
    pdpb_pb2.UNKNOWN: RequestRefused,
    pdpb_pb2.NOT_BOOTSTRAPPED: ClusterUnfit,
    pdpb_pb2.STORE_TOMBSTONE: RequestRefused,
    pdpb_pb2.ALREADY_BOOTSTRAPPED: RequestRefused,
    pdpb_pb2.INCOMPATIBLE_VERSION: ClusterUnfit,
    pdpb_pb2.REGION_NOT_FOUND: ClusterUnreachable,  # a moment later PD may know it
    pdpb_pb2.GLOBAL_CONFIG_NOT_FOUND: RequestRefused,
    pdpb_pb2.DUPLICATED_ENTRY: RequestRefused,
    pdpb_pb2.ENTRY_NOT_FOUND: RequestRefused,
    pdpb_pb2.INVALID_VALUE: RequestRefused,
    pdpb_pb2.DATA_COMPACTED: RequestRefused,
    pdpb_pb2.REGIONS_NOT_CONTAIN_ALL_KEY_RANGE: ClusterUnreachable,
}
"""The class of each error that a response header can carry."""

_LEADER_CHANGE = ("not leader", "ErrGenerateTimestamp", "[PD:etcd:", "etcdserver: ", "server not started")
"""Substrings of error texts while the leader of PD or of its etcd changes: another member can answer."""
_BAD_COUNT = "count should be positive"
"""Text of an `ErrGenerateTimestamp` caused by the request itself; not retried."""


class NoLeaderYet(ClusterUnreachable):
    """Some member is there, and none knows a leader: an election, or a member that is starting."""


class NotPd(ClusterUnreachable):
    """Another server listens at the address, such as one of HTTP, or a store."""

    retryable = False
    default_hint = "Pass the address of a PD member with --pd; PD listens at port 2379 by default."


NO_HTTP2 = "Failed parsing HTTP/2"
"""Substrings of gRPC's error texts for a server that does not speak HTTP/2."""


def check_header(error: pdpb_pb2.Error, who: str) -> None:
    """Raise what `HEADER_ERRORS` says for the error in an answer's header, if there is one; ``who`` has sent it."""
    if error.type == pdpb_pb2.OK:
        return
    error_class = HEADER_ERRORS.get(error.type, RequestRefused)
    if error.type == pdpb_pb2.UNKNOWN and is_passing(error.message):
        error_class = ClusterUnreachable
    raise error_class(f"{who}: {error.message or pdpb_pb2.ErrorType.Name(error.type)}")


def is_passing(message: str) -> bool:
    """Whether an error text is one of a leader change."""
    return any(text in message for text in _LEADER_CHANGE) and _BAD_COUNT not in message


def no_answer(messages: Mapping[str, str]) -> ClusterUnreachable:
    """The error for members that do not answer, by their addresses; a cause that all share is named once."""
    causes = {address: message.removeprefix(f"PD {address}: ") for address, message in messages.items()}
    if len(set(causes.values())) == 1:
        return ClusterUnreachable(f"no PD answers at {', '.join(causes)}: {next(iter(causes.values()))}")
    return ClusterUnreachable(
        f"no PD answers: {', '.join(f'at {address}: {cause}' for address, cause in causes.items())}"
    )
