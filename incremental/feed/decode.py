"""Messages of a store's feed: by the kernel where it can, by protobuf where there are errors in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from google.protobuf.message import DecodeError

from formats import cdc
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.errors import RequestRefused

RESOLVED = b"\x12"
"""The tag of the field ``resolved_ts``: how a message begins that has no events."""


@dataclass(frozen=True, slots=True)
class SubscriptionFailed:
    """An event that ends a subscription."""

    region_id: int
    request_id: int
    error: cdcpb_pb2.Error


@dataclass(frozen=True, slots=True)
class Message:
    """Rows and resolved-ts first, then the subscriptions that have ended."""

    changes: cdc.ChangeEvent
    failures: tuple[SubscriptionFailed, ...] = ()


def decode_all(data: Sequence[bytes]) -> Iterator[Message]:
    """Serialized messages of one stream, in order; see `decode`. Neighbours come out as one where they can.

    Put one after the other they are one message with all of their events, which costs no more than a small one alone. A
    resolved-ts ends what is put together: there may be one to a message. Stores send it by itself.
    """
    for is_resolved, group in groupby(data, _has_only_resolved_ts):
        parts = list(group)
        together = None if is_resolved or len(parts) == 1 else cdc.parse(b"".join(parts))
        if together is None:
            yield from map(decode, parts)
        else:
            yield Message(together)


def _has_only_resolved_ts(data: bytes) -> bool:
    return data.startswith(RESOLVED)


def decode(data: bytes) -> Message:
    """A serialized ``cdcpb.ChangeDataEvent``. Raises `RequestRefused` for damaged bytes and for rows of transactions."""
    changes = cdc.parse(data)
    return _by_protobuf(data) if changes is None else Message(changes)


def _by_protobuf(data: bytes) -> Message:
    """Take out what the kernel does not know, and have it read the rest."""
    try:
        message = cdcpb_pb2.ChangeDataEvent.FromString(data)
    except DecodeError as error:
        raise RequestRefused(f"a store's change event does not decode: {error}") from None
    message.DiscardUnknownFields()
    failures = tuple(
        SubscriptionFailed(event.region_id, event.request_id, event.error)
        for event in message.events
        if event.HasField("error")
    )
    rest = cdcpb_pb2.ChangeDataEvent()
    if message.HasField("resolved_ts"):
        rest.resolved_ts.CopyFrom(message.resolved_ts)
    for event in message.events:
        if not event.HasField("error"):
            rest.events.add().CopyFrom(event)
    for event in rest.events:
        for row in event.entries.entries:
            for unused in ("old_value", "txn_source", "generation"):
                row.ClearField(unused)
    changes = cdc.parse(rest.SerializeToString())
    if changes is None:
        raise RequestRefused("a store's change event has rows that are no puts and deletes of RawKV")
    return Message(changes, failures)
