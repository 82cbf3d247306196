"""Plays recorded change feeds (golden/cdc) against a playground: the same requests and writes, in lockstep.

Writes get the timestamps, and the store the clock, that they had in the recording, so that rows can be compared whole.
What was sent next was sent when so many events had come: here, too, it waits for them.
"""

from __future__ import annotations

import json
import queue
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import json_format

from tests.golden.wire_replay import Json, Outcome
from tikv_br.cluster.pb import cdcpb_pb2, cdcpb_pb2_grpc, tikvpb_pb2_grpc
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys import codec
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.cluster import Playground
from tikv_br.playground.region import Peer, Region

Event = cdcpb_pb2.Event
Frame = cdcpb_pb2.ChangeDataEvent
Request = cdcpb_pb2.ChangeDataRequest
_PATIENCE: Final = 60.0
"""Seconds until what must come is missing."""
_BEHIND: Final = 3500 << 18
"""A write's timestamp is at most so much behind PD's."""


@dataclass(frozen=True)
class Recording:
    """One scenario: what was sent and what came, with seconds since the stream was opened."""

    name: str
    method: str
    metadata: Sequence[tuple[str, str]]
    start: float
    """Wall clock when the stream was opened."""
    requests: Sequence[tuple[float, Request]]
    frames: Sequence[tuple[float, Frame]]
    script: Sequence[dict[str, Json]]
    status: str
    details: str

    def events(self, until: float = float("inf")) -> list[Event]:
        """Events before a moment, without resolved-ts."""
        return [event for offset, frame in self.frames if offset < until for event in frame.events if _is_news(event)]

    def last_resolved(self) -> list[Frame]:
        """The resolved-ts that came after the last other event."""
        last = max((at for at, (_, frame) in enumerate(self.frames) if any(map(_is_news, frame.events))), default=-1)
        return [frame for _, frame in self.frames[last + 1 :]]


def load(folder: Path) -> Recording:
    """Read a scenario's folder."""
    recorded = json.loads((folder / "frames.json").read_text())
    script = folder / "script.jsonl"
    error = recorded["stream_error"] or {"code": "OK", "details": ""}
    requests = _messages(folder / "requests.bin", Request)
    frames = _messages(folder / "frames.bin", Frame)
    return Recording(
        name=folder.name,
        method=recorded["method"].rpartition("/")[2],
        metadata=[(key, value) for key, value in recorded["metadata"] or []],
        start=recorded["stream_start_wall"],
        requests=[(each["offset"], message) for each, message in zip(recorded["requests"], requests, strict=True)],
        frames=[(each["offset"], message) for each, message in zip(recorded["frames"], frames, strict=True)],
        script=[json.loads(line) for line in script.read_text().splitlines()] if script.exists() else [],
        status=error["code"],
        details=error["details"],
    )


def _messages(path: Path, message_type: Any) -> list[Any]:  # noqa: ANN401 - a class of messages
    data, messages = path.read_bytes(), []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        messages.append(message_type.FromString(data[at + 4 : at + 4 + size]))
        at += 4 + size
    return messages


def _is_news(event: Event) -> bool:
    return event.WhichOneof("event") != "resolved_ts"


# -- the regions --------------------------------------------------------------------------------------------------


def first_regions(recordings: Sequence[Recording]) -> list[Region]:
    """Return the regions that were subscribed to before any split, on store 1, with their recorded ids and epochs."""
    splits = [op["wall"] for each in recordings for op in each.script if op["op"] == "split"]
    until = min(splits, default=float("inf"))
    peers = dict(region_ids(recordings).values())
    found: dict[int, Region] = {}
    for recording in recordings:
        for offset, sent in recording.requests:
            epoch = sent.region_epoch
            if recording.start + offset > until or not epoch.version:  # one that deregisters says no epoch
                continue
            start, end = sent.start_key, sent.end_key
            if before := found.get(sent.region_id):  # a part of it, or all of it again
                start, end = min(start, before.start), max(end, before.end) if end and before.end else b""
            peer = Peer(peers.get(sent.region_id, sent.region_id + 1), 1)  # PD allocates a peer's id after its region's
            found[sent.region_id] = Region(sent.region_id, start, end, epoch.conf_ver, epoch.version, (peer,), 1)
    return list(found.values())


def region_ids(recordings: Sequence[Recording]) -> dict[bytes, tuple[int, int]]:
    """Return the recorded region id and peer id by end key, for regions in errors."""
    return {
        region.end_key: (region.id, region.peers[0].id)
        for recording in recordings
        for event in recording.events()
        for region in event.error.epoch_not_match.current_regions
    }


# -- the store's clocks ------------------------------------------------------------------------------------------


class ScriptedClock:
    """A store's causal timestamps, each write's told in advance. The one before it is for the write's pin.

    From then on until the write is done, resolved-ts stay below it: a slow machine sends some in between, which also take one.
    """

    def __init__(self, hub: ChangeHub) -> None:
        self._hub, self._pins = hub, hub._pins[1]
        self._lock = threading.Lock()
        self._wanted = self._last = 0

    @property
    def last(self) -> int:
        """The last timestamp given."""
        return self._last

    def want(self, ts: int) -> None:
        """Let ``ts`` be the next write's."""
        self.release()
        with self._hub.lock:
            self._pins.add(ts - 1)
        with self._lock:
            self._wanted, self._last = ts, ts - 2

    def release(self) -> None:
        """The write is done."""
        with self._hub.lock:
            self._pins.discard(self._wanted - 1)

    def next_ts(self) -> int:
        """One below the requested timestamp, then that, and again."""
        with self._lock:
            self._last = min(self._last + 1, self._wanted)
            return self._last

    def flush(self) -> None:
        """Nothing is cached."""

    def renew(self) -> None:
        """Nothing is fetched."""


class KnownTimestamps:
    """Commit-ts of each recorded row."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._by_row: defaultdict[tuple[bytes, bytes, bool], set[int]] = defaultdict(set)
        for recording in recordings:
            for event in recording.events():
                for row in event.entries.entries:
                    self._by_row[row.key, row.value, row.op_type == Event.Row.DELETE].add(row.commit_ts)

    def of(self, rows: Sequence[tuple[bytes, bytes | None]], above: int, until: int) -> int | None:
        """The timestamp of one write of all these rows (value None: deleted), None if nobody saw it."""
        later = range(max(above, until - _BEHIND) + 1, until + 1)
        each = ({ts for ts in self._by_row[key, value or b"", value is None] if ts in later} for key, value in rows)
        seen = [found for found in each if found]  # of a row overwritten before a scan nothing was seen
        return min(set.intersection(*seen), default=None) if seen else None


# -- writing -----------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Carries out a script's operations on a playground of one store."""

    playground: Playground
    stub: tikvpb_pb2_grpc.TikvStub
    known: KnownTimestamps
    clock: ScriptedClock
    split_ids: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)
    """Recorded id and peer id of the region that ends at a bound."""
    now: float = 0.0

    def run(self, op: dict[str, Json]) -> None:
        """One operation, at its recorded time."""
        self.now = op["wall"]
        match op["op"]:
            case "split":
                bound = codec.encode(bytes.fromhex(op["key"]))
                ids = [self.split_ids[bound]] if bound in self.split_ids else []
                self.playground.regions.split(self.playground.regions.locate(bound).id, [bound], ids)
            case "delete_range":
                start, end = bytes.fromhex(op["key"]), bytes.fromhex(op["end"])
                context = self._context(self._region(start))
                answer = self.stub.RawDeleteRange(
                    kv.RawDeleteRangeRequest(context=context, start_key=start, end_key=end), timeout=30
                )
                assert answer == kv.RawDeleteRangeResponse()
            case "batch_put":
                items = [(each["key"], each["value"], each.get("ttl", 0)) for each in op["items"]]
                rows = sorted((*_row(key, value), ttl) for key, value, ttl in items)  # as the recorder sent them
                self._by_region(op, rows, self._batch_put)
            case "batch_delete":
                self._by_region(op, [(bytes.fromhex(key), None, 0) for key in op["keys"]], self._batch_delete)
            case kind:
                self._single(kind, op)
        self.clock.release()

    def _single(self, kind: str, op: dict[str, Json]) -> None:
        key, value = _row(op["key"], op.get("value"))
        if kind != "cas" or op["succeed"]:
            self._tell_time(op, [(key, value)])
        context = self._context(self._region(key))
        if kind == "delete":
            deleted = self.stub.RawDelete(kv.RawDeleteRequest(context=context, key=key), timeout=60)
            assert deleted == kv.RawDeleteResponse()
        elif kind == "cas":
            swap = kv.RawCASRequest(context=context, key=key, value=value or b"", ttl=op.get("ttl", 0))
            swap.previous_not_exist = op.get("previous") is None
            swap.previous_value = bytes.fromhex(op.get("previous") or "")
            assert self.stub.RawCompareAndSwap(swap, timeout=60).succeed == op["succeed"]
        else:
            assert kind in {"put", "put_for_cas"}
            put = kv.RawPutRequest(context=context, key=key, value=value or b"", ttl=op.get("ttl", 0))
            put.for_cas = kind == "put_for_cas"
            assert self.stub.RawPut(put, timeout=60) == kv.RawPutResponse()

    def _by_region(
        self,
        op: dict[str, Json],
        rows: Sequence[tuple[bytes, bytes | None, int]],
        write: Callable[[Region, Sequence[tuple[bytes, bytes | None, int]]], None],
    ) -> None:
        """Regions in the order of the timestamps that they got; those that nobody saw fill the gaps."""
        groups: defaultdict[int, list[tuple[bytes, bytes | None, int]]] = defaultdict(list)
        for row in rows:
            groups[self._region(row[0]).id].append(row)
        seen = {each: self._known(op, [row[:2] for row in group]) for each, group in groups.items()}
        in_order = sorted((ts, region_id) for region_id, ts in seen.items() if ts is not None)
        unseen = [region_id for region_id, ts in seen.items() if ts is None]
        while in_order or unseen:
            ts = self.clock.last + 2
            if in_order and (in_order[0][0] <= ts or not unseen):
                ts, region_id = in_order.pop(0)
            else:
                region_id = unseen.pop(0)
            self.clock.want(ts)
            region = self.playground.regions.get(region_id)
            assert region is not None
            write(region, groups[region_id])

    def _batch_put(self, region: Region, rows: Sequence[tuple[bytes, bytes | None, int]]) -> None:
        pairs = [kv.KvPair(key=key, value=value or b"") for key, value, _ in rows]
        request = kv.RawBatchPutRequest(context=self._context(region), pairs=pairs, ttls=[ttl for _, _, ttl in rows])
        assert self.stub.RawBatchPut(request, timeout=60) == kv.RawBatchPutResponse()

    def _batch_delete(self, region: Region, rows: Sequence[tuple[bytes, bytes | None, int]]) -> None:
        request = kv.RawBatchDeleteRequest(context=self._context(region), keys=[key for key, _, _ in rows])
        assert self.stub.RawBatchDelete(request, timeout=60) == kv.RawBatchDeleteResponse()

    def _tell_time(self, op: dict[str, Json], rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.clock.want(self._known(op, rows) or self.clock.last + 2)

    def _known(self, op: dict[str, Json], rows: Sequence[tuple[bytes, bytes | None]]) -> int | None:
        return self.known.of(rows, self.clock.last, op["tso_after"])

    def _region(self, key: bytes) -> Region:
        return self.playground.regions.locate(codec.encode(key))

    def _context(self, region: Region) -> kv.Context:
        epoch = region.to_pb().region_epoch
        return kv.Context(region_id=region.id, region_epoch=epoch, peer=region.leader.to_pb(), api_version=kv.V2)


def _row(key: str, value: str | None) -> tuple[bytes, bytes | None]:
    return bytes.fromhex(key), None if value is None else bytes.fromhex(value)


# -- listening ---------------------------------------------------------------------------------------------------


@dataclass
class Listener:
    """An open stream that keeps what comes."""

    call: Any
    requests: queue.SimpleQueue[Request | None]
    frames: list[Frame] = field(default_factory=list)
    status: str = "OK"
    details: str = ""
    _news: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False

    @classmethod
    def open(cls, channel: grpc.Channel, recording: Recording) -> Listener:
        """Open the recorded method's stream."""
        requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        method = getattr(cdcpb_pb2_grpc.ChangeDataStub(channel), recording.method)
        listener = cls(method(iter(requests.get, None), metadata=recording.metadata), requests)
        threading.Thread(target=listener._listen, daemon=True).start()
        return listener

    def _listen(self) -> None:
        try:
            for frame in self.call:
                with self._news:
                    self.frames.append(frame)
                    self._news.notify()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self.status, self.details = error.code().name, error.details() or ""
        with self._news:
            self._over = True
            self._news.notify()

    def events(self) -> list[Event]:
        """Events so far, without resolved-ts."""
        return [event for frame in list(self.frames) for event in frame.events if _is_news(event)]

    def resolved(self) -> list[Frame]:
        """The resolved-ts after the last other event."""
        frames = list(self.frames)
        last = max((at for at, frame in enumerate(frames) if any(map(_is_news, frame.events))), default=-1)
        return frames[last + 1 :]

    def wait(self, condition: Callable[[], bool], seconds: float = _PATIENCE) -> bool:
        """Whether a condition of what came holds in time (or the stream has ended)."""
        with self._news:
            return self._news.wait_for(lambda: self._over or condition(), seconds)

    def close(self) -> None:
        """End the call."""
        self.requests.put(None)
        self.call.cancel()


def play(recording: Recording, channel: grpc.Channel, writer: Writer | None, done: set[float]) -> Listener:
    """Send and write what was sent and written, in that order; returns the stream, closed.

    ``done``: moments of operations that an earlier recording has carried out.
    """
    script = [op for op in recording.script if op["wall"] not in done]
    done.update(op["wall"] for op in script)
    before = [op for op in script if op["wall"] < recording.start]
    for op in before:
        assert writer is not None
        writer.run(op)
    listener = Listener.open(channel, recording)
    steps: list[tuple[float, Request | dict[str, Json]]] = list(recording.requests)
    steps += [(op["wall"] - recording.start, op) for op in script[len(before) :]]
    for offset, step in sorted(steps, key=lambda each: each[0]):
        expected = len(recording.events(until=offset))
        listener.wait(lambda expected=expected: len(listener.events()) >= expected)  # type: ignore[misc]
        if isinstance(step, Request):
            listener.requests.put(step)
        else:
            assert writer is not None
            writer.run(step)
    expected = len(recording.events())
    listener.wait(lambda: len(listener.events()) >= expected)
    shapes = len({_shape(frame) for frame in recording.last_resolved()})
    if shapes:
        listener.wait(lambda: len(listener.resolved()) >= 2 * shapes)
    else:
        listener.wait(lambda: bool(listener.resolved()), seconds=0.3)  # nothing may come
    listener.close()
    return listener


# -- comparing ---------------------------------------------------------------------------------------------------


def outcome(events: Sequence[Event], resolved: Sequence[Frame], status: str, details: str) -> Outcome:
    """A stream in a comparable form: each request's events in order, then the receivers of resolved-ts."""
    by_request: defaultdict[int, list[Json]] = defaultdict(list)
    for event in events:
        by_request[event.request_id].append(json_format.MessageToDict(event, preserving_proto_field_name=True))
    messages: list[Json] = [{"request": key, "events": by_request[key]} for key in sorted(by_request)]
    shapes = [json.loads(shape) for shape in sorted({_shape(frame) for frame in resolved})]
    messages.append({"resolved": [shape for shape in shapes if not any(_is_part(shape, each) for each in shapes)]})
    return Outcome(messages, status, details)


def _is_part(one: Json, other: Json) -> bool:
    """Return whether a later resolved-ts extends the same request's regions: one just subscribed may join late."""
    mine, theirs = one.get("resolved_ts", {}), other.get("resolved_ts", {})
    return set(mine.get("regions", [])) < set(theirs.get("regions", [])) and mine.get("request_id") == theirs.get(
        "request_id"
    )


def _shape(frame: Frame) -> str:
    """A message of resolved-ts without its timestamp; regions have no order."""
    fields = json_format.MessageToDict(frame, preserving_proto_field_name=True)
    for event in fields.get("events", []):
        del event["resolved_ts"]
    if "resolved_ts" in fields:
        del fields["resolved_ts"]["ts"]
        fields["resolved_ts"]["regions"].sort()
    return json.dumps(fields, sort_keys=True)


def broken_promises(frames: Sequence[Frame]) -> Iterator[str]:
    """Each live event that came after a resolved-ts at or above it, and each resolved-ts that went back."""
    recorded: defaultdict[int, int] = defaultdict(int)
    for frame in frames:
        for event in frame.events:
            for row in event.entries.entries:
                if event.index and row.commit_ts <= recorded[event.region_id]:
                    yield f"region {event.region_id}: {row.commit_ts} after {recorded[event.region_id]}"
        pairs = [(region_id, frame.resolved_ts.ts) for region_id in frame.resolved_ts.regions]
        pairs += [(event.region_id, event.resolved_ts) for event in frame.events if event.resolved_ts]
        for region_id, ts in pairs:
            if ts < recorded[region_id]:
                yield f"region {region_id}: resolved {ts} after {recorded[region_id]}"
            recorded[region_id] = ts
