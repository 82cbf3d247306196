"""Plays recorded requests (golden/wire) against a playground and compares the answers field by field.

A recording is one conversation: every entry meets the state that the ones before it left. So all entries are played in
order; what may differ from the recording is listed, with the reason (`MayDiffer`). Services that need more than the
bare request (paths, files) say so with a `Prepare`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool, json_format, symbol_database
from google.protobuf.message import Message

from tikv_br.cluster.pb import (  # noqa: F401 - their messages are looked up by name
    brpb_pb2,
    import_sstpb_pb2,
    keyspacepb_pb2,
    kvrpcpb_pb2,
    pdpb_pb2,
    tikvpb_pb2,
)

Json: TypeAlias = Any
"""A value as JSON has them."""
BIG_VALUE = b"\xaa" * (9 << 20)
"""The value that the recording left out of one request's file."""
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Entry:
    """One recorded call: a gRPC method with its messages, or an HTTP request."""

    index: int
    fields: Mapping[str, Json]
    folder: Path

    @property
    def rpc(self) -> str:
        """Its name as recorded, such as ``PD/Tso``, ``RawGet`` or ``HTTP``."""
        return str(self.fields["rpc"])

    @property
    def name(self) -> str:
        """Name for a reader."""
        return f"{self.index} {self.rpc}: {self.fields.get('condition') or self.fields.get('url')}"

    @property
    def subject(self) -> str:
        """Key of the rules: the RPC, or ``HTTP`` and the path."""
        return f"HTTP {str(self.fields['url']).split(' ')[1].partition('?')[0]}" if self.is_http else self.rpc

    @property
    def is_http(self) -> bool:
        """Whether it is no gRPC call."""
        return self.rpc == "HTTP"

    def requests(self) -> list[Json]:
        """The messages sent."""
        messages = self.messages("request")
        if "9 MiB" in str(self.fields.get("condition")):
            messages[0].value = BIG_VALUE
        return messages

    def outcome(self) -> Outcome:
        """Answer of the real server."""
        if self.is_http:
            return Outcome([_parse_json((self.folder / self.fields["file"]).read_text())], str(self.fields["status"]))
        status = self.fields.get("grpc_status", {})
        return Outcome(
            [_as_dict(message) for message in self.messages("response")],
            status.get("code", "OK"),
            status.get("details", ""),
        )

    def messages(self, kind: str) -> list[Json]:
        """The protobuf messages of the entry's ``request`` or ``response`` files."""
        files: Sequence[str] = self.fields.get(f"{kind}_files", [])
        if not files:
            return []
        message_type = symbol_database.Default().GetSymbol(self.fields[f"{kind}_type"])
        return [message_type.FromString((self.folder / file).read_bytes()) for file in files]


@dataclass(frozen=True)
class Outcome:
    """Answer: messages as JSON-like values, and the end of the call."""

    messages: list[Json]
    status: str = "OK"
    details: str = ""


@dataclass(frozen=True)
class MayDiffer:
    """A field that need not equal the recording.

    ``subject`` (see `Entry.subject`) and ``path`` are glob patterns, ``path`` is matched without indexes and the point
    after them. ``alike`` decides whether two values are both fine; without it any difference is.
    """

    subject: str
    path: str
    why: str
    alike: Callable[[Json, Json], bool] | None = None

    def allows(self, subject: str, path: str, recorded: Json, got: Json) -> bool:
        """Whether this rule lets the two pass."""
        bare = re.sub(r"\[\d+\]", "", path).lstrip(".")
        matches = fnmatch.fnmatchcase(subject, self.subject) and fnmatch.fnmatchcase(bare, self.path)
        return matches and (self.alike is None or self.alike(recorded, got))


@dataclass(frozen=True)
class Target:
    """The servers that requests are played against: addresses as ``host:port``."""

    pd: str
    store: str
    store_status: str
    _channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def channel(self, address: str) -> grpc.Channel:
        """One channel an address, without limits."""
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=_UNLIMITED)
        return self._channels[address]

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            channel.close()


Prepare = Callable[[Entry, list[Json]], list[Json]]
"""Makes requests playable: fills in paths that the recording holds placeholders for."""
Normalize = Callable[[Entry, Outcome], Outcome]
"""Brings an outcome, recorded or got, into a form that can be compared."""


def load(folder: Path) -> list[Entry]:
    """All entries of a recording, in order."""
    index = json.loads((folder / "index.json").read_text())
    return [Entry(number, fields, folder) for number, fields in enumerate(index["entries"])]


def play(entry: Entry, target: Target, prepare: Prepare | None = None) -> Outcome:
    """Send what an entry sent and return what comes back."""
    if entry.is_http:
        return _play_http(entry, target)
    requests = entry.requests()
    if prepare is not None:
        requests = prepare(entry, requests)
    path, address = _route(entry, target)
    response_type = _response_type(path)
    call: Json = target.channel(address).stream_stream(
        path, request_serializer=lambda message: message.SerializeToString(), response_deserializer=response_type
    )
    got: list[Json] = []
    try:
        for message in call(iter(requests), timeout=30):
            got.append(_as_dict(message))  # noqa: PERF401 - what came before an error counts too
    except grpc.RpcError as error:
        return Outcome(got, error.code().name, error.details() or "")
    return Outcome(got)


def replay(
    entries: Iterable[Entry],
    target: Target,
    rules: Sequence[MayDiffer],
    *,
    prepare: Prepare | None = None,
    normalize: Normalize = lambda _entry, outcome: outcome,
) -> dict[str, list[str]]:
    """Play entries in order; the differences that no rule allows, by entry (all entries are keys)."""
    return {
        entry.name: list(
            differences(entry, normalize(entry, entry.outcome()), normalize(entry, play(entry, target, prepare)), rules)
        )
        for entry in entries
    }


def differences(entry: Entry, recorded: Outcome, got: Outcome, rules: Sequence[MayDiffer]) -> Iterator[str]:
    """One line for each field that differs and may not."""
    left = {"status": recorded.status, "details": recorded.details, **flatten(recorded.messages)}
    right = {"status": got.status, "details": got.details, **flatten(got.messages)}
    for path in [*left, *(path for path in right if path not in left)]:
        one, other = left.get(path), right.get(path)
        if one != other and not any(rule.allows(entry.subject, path, one, other) for rule in rules):
            yield f"{path}: recorded {_short(one)}, got {_short(other)}"


def flatten(value: Json, path: str = "") -> dict[str, Json]:
    """Every leaf of a JSON-like value by its path: ``[0].kvs[2].key``. Empty containers are leaves."""
    if isinstance(value, dict) and value:
        items = [(f"{path}.{name}".lstrip("."), each) for name, each in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    else:
        return {path: value} if path else {}
    return {leaf: found for where, each in items for leaf, found in flatten(each, where).items()}


def _play_http(entry: Entry, target: Target) -> Outcome:
    method, path = str(entry.fields["url"]).split(" ")[:2]
    address = target.store_status if "TiKV status address" in entry.fields["url"] else target.pd
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Outcome([_parse_json(response.read().decode())], str(response.status))
    except urllib.error.HTTPError as error:
        with error:
            return Outcome([_parse_json(error.read().decode())], str(error.code))


def _route(entry: Entry, target: Target) -> tuple[str, str]:
    service, _, method = entry.rpc.rpartition("/")
    match service:
        case "PD":
            return f"/pdpb.PD/{method}", target.pd
        case "Keyspace":
            return f"/keyspacepb.Keyspace/{method}", target.pd
        case "ImportSST":
            return f"/import_sstpb.ImportSST/{method}", target.store
        case _ if method == "Backup":
            return "/backup.Backup/backup", target.store
    return f"/tikvpb.Tikv/{method}", target.store


def _response_type(path: str) -> Callable[[bytes], Message]:
    """The parser of a method's responses, off the services' descriptors."""
    _, service, method = path.split("/")
    pool = descriptor_pool.Default()
    output = pool.FindServiceByName(service).FindMethodByName(method).output_type
    parse: Callable[[bytes], Message] = symbol_database.Default().GetSymbol(output.full_name).FromString
    return parse


def _as_dict(message: Message) -> dict[str, Json]:
    fields: dict[str, Json] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields


def _parse_json(text: str) -> Json:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
