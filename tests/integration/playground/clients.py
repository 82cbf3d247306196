"""A bare client of a playground: plain stubs, no retries, no product code on the way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
import pytest

from tests.support.playground_admin import PlaygroundAdmin
from tests.support.waiting import PATIENCE, eventually
from tikv_br.cluster.pb import kvrpcpb_pb2, pdpb_pb2, pdpb_pb2_grpc, tikvpb_pb2_grpc
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground import failpoints
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.region import Region
from tikv_br.playground.scheduler import KEYSPACE_BOUNDS

Message: TypeAlias = Any
"""Any protobuf message: which one follows from the RPC's name."""


@dataclass
class Client:
    """Calls PD and stores of a playground that runs in this process."""

    playground: Playground
    credentials: grpc.ChannelCredentials | None = None
    _channels: dict[str, grpc.Channel] = field(default_factory=dict)

    @property
    def header(self) -> pdpb_pb2.RequestHeader:
        """The header of every request to PD."""
        return pdpb_pb2.RequestHeader(cluster_id=self.playground.state.cluster_id)

    @property
    def pd(self) -> pdpb_pb2_grpc.PDStub:
        """PD's stub."""
        return pdpb_pb2_grpc.PDStub(self.channel(self.playground.state.address))

    @property
    def admin(self) -> PlaygroundAdmin:
        """The admin API."""
        return PlaygroundAdmin(self.playground.state.address)

    def store(self, store_id: int) -> tikvpb_pb2_grpc.TikvStub:
        """A store's stub."""
        return tikvpb_pb2_grpc.TikvStub(self.channel(self.playground.nodes[store_id].address))

    def key(self, user: bytes) -> bytes:
        """A user's key as requests carry it."""
        return b"r\0\0\0" + user if self.playground.settings.version is ApiVersion.V2 else user

    def region(self, user: bytes) -> Region:
        """The region of a user's key."""
        key = self.key(user)
        is_v2 = self.playground.settings.version is ApiVersion.V2
        return self.playground.regions.locate(codec.encode(key) if is_v2 else key)

    def context(self, region: Region) -> kvrpcpb_pb2.Context:
        """A request's context for a region's leader."""
        is_v2 = self.playground.settings.version is ApiVersion.V2
        return kvrpcpb_pb2.Context(
            region_id=region.id,
            region_epoch=region.to_pb().region_epoch,
            peer=region.leader.to_pb(),
            api_version=kvrpcpb_pb2.V2 if is_v2 else kvrpcpb_pb2.V1,
        )

    def put(self, user: bytes, value: bytes, ttl: int = 0) -> Message:
        """RawPut to the leader."""
        return self.call("RawPut", user, kvrpcpb_pb2.RawPutRequest(key=self.key(user), value=value, ttl=ttl))

    def get(self, user: bytes) -> bytes | None:
        """RawGet from the leader; None where there is nothing."""
        answer = self.call("RawGet", user, kvrpcpb_pb2.RawGetRequest(key=self.key(user)))
        assert not answer.HasField("region_error"), answer
        return None if answer.not_found else answer.value

    def call(self, rpc: str, user: bytes, request: Message, *, region: Region | None = None) -> Message:
        """Any unary RPC about a key, sent to its region's leader."""
        region = region or self.region(user)
        request.context.CopyFrom(self.context(region))
        return getattr(self.store(region.leader_store), rpc)(request, timeout=PATIENCE)

    def channel(self, address: str) -> grpc.Channel:
        """One channel an address."""
        if address not in self._channels:
            self._channels[address] = (
                grpc.secure_channel(address, self.credentials) if self.credentials else grpc.insecure_channel(address)
            )
        return self._channels[address]

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            channel.close()


def hold_delays(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have delays of failpoints in this process last until the event is set, however slow the machine is."""
    over = threading.Event()

    def sleep(_seconds: float) -> None:
        assert over.wait(PATIENCE)

    monkeypatch.setattr(failpoints, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return over


@contextlib.contextmanager
def running(
    folder: Path,
    api_version: ApiVersion = ApiVersion.V1,
    *,
    client: grpc.ChannelCredentials | None = None,
    **changes: object,
) -> Iterator[Client]:
    """A playground in this process with a client, stopped at the end. PD's own splits are done unless delayed."""
    changes = {"keyspace_split_delay": 0.0, "balance": False, **changes}
    playground = open_playground(folder, api_version=api_version.value, **changes)
    try:
        playground.start()
        if not changes["keyspace_split_delay"]:
            eventually(lambda: len(playground.regions.all()) >= len(KEYSPACE_BOUNDS) + 1)
        with contextlib.closing(Client(playground, client)) as opened:
            yield opened
    finally:
        playground.stop()
