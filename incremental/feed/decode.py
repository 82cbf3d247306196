"""Decodes the messages of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from google.protobuf.message import DecodeError

from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.errors import RequestRefused
from tikv_br.formats import cdc

RESOLVED = b"\x12"
"""The tag of the field ``resolved_ts``, with which a message without events starts."""


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """A decoded message: rows and resolved-ts, which are handled first, and subscriptions that have ended."""

    changes: cdc.ChangeEvent
    failures: tuple[cdcpb_pb2.Event, ...] = ()
    """Events with an error."""


def decode_all(data: Sequence[bytes]) -> Iterator[FeedMessage]:
    """Decode serialized messages of one stream, in order (see `decode`); adjacent messages are merged if possible.

    Concatenated messages decode as one message with all their events, which costs about as much as decoding a small one.
    Messages with a resolved-ts are not merged: a message has at most one. Stores send it without events.
    """
    for is_resolved, group in groupby(data, lambda each: each.startswith(RESOLVED)):
        parts = list(group)
        merged = None if is_resolved or len(parts) == 1 else cdc.parse(b"".join(parts))
        if merged is None:
            yield from map(decode, parts)
        else:
            yield FeedMessage(merged)


def decode(data: bytes) -> FeedMessage:
    """Decode a ``cdcpb.ChangeDataEvent``. Raises `RequestRefused` for damaged bytes and for transactional rows."""
    changes = cdc.parse(data)
    return _decode_with_protobuf(data) if changes is None else FeedMessage(changes)


def _decode_with_protobuf(data: bytes) -> FeedMessage:
    """Decode a message with fields that `cdc.parse` does not know: split off errors, drop unused fields, parse the rest."""
    try:
        message = cdcpb_pb2.ChangeDataEvent.FromString(data)
    except DecodeError as error:
        raise RequestRefused(f"cannot decode a store's change event: {error}") from None
    message.DiscardUnknownFields()
    failures = tuple(event for event in message.events if event.HasField("error"))
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
        raise RequestRefused("cannot decode a store's change event: it has rows other than RawKV puts and deletes")
    return FeedMessage(changes, failures)
