"""Reactions of the router to the fields of ``errorpb.Error``."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from tikv_br import retry
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.errors import ApiVersionMismatch, ClusterError, RequestRefused, UsageError
from tikv_br.retry import Backoff


class Action(enum.Enum):
    """Action of the router before the next try."""

    SWITCH_LEADER = "go to the leader that the store names, or ask PD"
    APPLY_REGIONS = "take the regions that the store sent"
    RELOCATE = "forget the region and ask PD"
    RECONNECT = "forget the region and the store's address, and ask PD"
    RETRY = "ask the same store again"
    FAIL = "raise the error"


class Reaction(Struct, frozen=True):
    """An action, and the wait before it takes effect."""

    action: Action
    backoff: Backoff = retry.REGION_MISS


REACTIONS: Mapping[str, Reaction] = {
    "not_leader": Reaction(Action.SWITCH_LEADER, retry.NO_LEADER),
    "region_not_found": Reaction(Action.RELOCATE),
    "key_not_in_region": Reaction(Action.RELOCATE),
    "epoch_not_match": Reaction(Action.APPLY_REGIONS),
    "server_is_busy": Reaction(Action.RETRY, retry.STORE_BUSY),
    "stale_command": Reaction(Action.RETRY, retry.STALE_COMMAND),
    "store_not_match": Reaction(Action.RECONNECT),
    "raft_entry_too_large": Reaction(Action.FAIL),
    "max_timestamp_not_synced": Reaction(Action.RETRY, retry.NOT_READY),
    "read_index_not_ready": Reaction(Action.RETRY, retry.NOT_READY),
    "proposal_in_merging_mode": Reaction(Action.RETRY, retry.NOT_READY),
    "data_is_not_ready": Reaction(Action.RETRY, retry.NOT_READY),
    "region_not_initialized": Reaction(Action.RETRY, retry.STALE_COMMAND),
    "disk_full": Reaction(Action.RETRY, retry.DISK_FULL),
    "RecoveryInProgress": Reaction(Action.RELOCATE, retry.RECOVERY),
    "FlashbackInProgress": Reaction(Action.FAIL),
    "FlashbackNotPrepared": Reaction(Action.FAIL),
    "is_witness": Reaction(Action.RELOCATE, retry.WITNESS),
    "mismatch_peer_id": Reaction(Action.RELOCATE),
    "bucket_version_not_match": Reaction(Action.RELOCATE),
    "undetermined_result": Reaction(Action.RETRY, retry.STALE_COMMAND),
}
"""Every kind of region error by its field's name in ``errorpb.Error``."""

MESSAGE_ONLY = Reaction(Action.RELOCATE, retry.STORE_UNREACHABLE)
"""Reaction to errors with only a message: "TiKV is Closing", "ingest file conflict"."""

NO_TIMESTAMP = ("fail to flush causal ts", "Fail to get ts")
"""Substrings of a store's error text if it gets no timestamp from PD, as after a leader's death; nothing is written."""

_ERROR_TEXTS: tuple[tuple[str, type[ClusterError | UsageError]], ...] = (
    ("Api version in request does not match", ApiVersionMismatch),
    ("ApiVersionNotMatched", ApiVersionMismatch),
    ("Key mode mismatched", ApiVersionMismatch),
    ("KeyModeNotMatched", ApiVersionMismatch),
    ("ttl is not enabled", UsageError),
    ("max key size exceeded", UsageError),
)


class RegionErrorSeen(Exception):
    """A store refused a request for a reason that the router can act on. Never leaves this package's callers."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(describe(error))
        self.error = error
        self.kind = kind_of(error)

    @property
    def reaction(self) -> Reaction:
        return REACTIONS.get(self.kind, MESSAGE_ONLY)


class _Answer(Protocol):
    def HasField(self, field_name: Literal["region_error"]) -> bool: ...  # noqa: N802 - protobuf's name

    @property
    def region_error(self) -> errorpb_pb2.Error: ...


def kind_of(error: errorpb_pb2.Error) -> str:
    """Name of the field that is set, or "" when there is only a message."""
    return next((kind for kind in REACTIONS if error.HasField(kind)), "")  # type: ignore[arg-type]


def describe(error: errorpb_pb2.Error) -> str:
    return f"{kind_of(error) or 'region error'}: {error.message}"


def check_region_error(answer: _Answer) -> None:
    if answer.HasField("region_error"):
        raise RegionErrorSeen(answer.region_error)


def check_error_text(text: str) -> None:
    """Raise what the ``error`` string of an answer means, if there is one.

    `RegionErrorSeen` for a key outside the region (V1 stores have no typed form of it) and for a store without
    timestamps, else `ApiVersionMismatch`, `UsageError` or `RequestRefused`.
    """
    if not text:
        return
    if "is out of [region" in text:
        raise RegionErrorSeen(errorpb_pb2.Error(message=text, key_not_in_region=errorpb_pb2.KeyNotInRegion()))
    if any(marker in text for marker in NO_TIMESTAMP):
        raise RegionErrorSeen(
            errorpb_pb2.Error(message=text, max_timestamp_not_synced=errorpb_pb2.MaxTimestampNotSynced())
        )
    check_values(text)
    error_class = next((error for marker, error in _ERROR_TEXTS if marker in text), RequestRefused)
    raise error_class(f"a store refused the request: {text}")


def check_values(text: str) -> None:
    """Raise `RequestRefused` for the text of a store that found the commit of a transaction, but not its value."""
    if "default not found" in text or "DefaultNotFound" in text:
        raise RequestRefused(
            f"values of transactions are missing in the cluster: {text}",
            hint="Something has destroyed them, such as deletes of raw keys in the same range. Restore the data into an empty cluster.",
        )


class _FullAnswer(_Answer, Protocol):
    """Answer with a region error and an error text, as most have."""

    @property
    def error(self) -> str: ...


def check_answer(answer: _FullAnswer) -> None:
    """Raise what an answer carries as a region error or as an error text."""
    check_region_error(answer)
    check_error_text(answer.error)


def check_pairs(pairs: Sequence[kvrpcpb_pb2.KvPair]) -> None:
    """Raise as `check_error_text` for answers whose error is in their first pair."""
    if pairs and pairs[0].HasField("error"):
        error = pairs[0].error
        check_error_text(error.abort or error.retryable or "error without a message")
