"""A store that leads the only region and answers backup requests as a test says, and as much of its cluster as a task uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tikv_br import cancellation
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.regions import Peer, Region
from tikv_br.cluster.topology import Store, StoreState
from tikv_br.formats.api_version import ApiVersion

Answer: TypeAlias = Callable[[brpb_pb2.BackupRequest], list[brpb_pb2.BackupResponse]]


def answer_at_once(request: brpb_pb2.BackupRequest) -> list[brpb_pb2.BackupResponse]:
    """No row, so no file."""
    answer = brpb_pb2.BackupResponse(
        start_key=request.start_key, end_key=request.end_key, api_version=request.dst_api_version
    )
    return [answer]


class Answers(list[brpb_pb2.BackupResponse]):
    """The stream of answers to one request."""

    waiting = False

    def cancel(self) -> None:
        """It has ended."""


class OneStore:
    """The only store, which leads the only region; and as much of its cluster as a task uses."""

    cluster_id = 7
    config = ClusterConfig(("127.0.0.1:1",))
    api_version = ApiVersion.V1
    router: Any = None
    tso: Any = None

    def __init__(self, answer: Answer = answer_at_once) -> None:
        self.store_description = Store(1, "127.0.0.1:2", "", StoreState.UP, "")
        self.answer = answer
        self.requests: list[brpb_pb2.BackupRequest] = []

    @property
    def pd(self) -> OneStore:
        """PD."""
        return self

    def scan_regions(self, _start: bytes, _end: bytes) -> list[Region]:
        """The region."""
        return [Region(1, b"", b"", 1, 1, Peer(2, 1), (Peer(2, 1),))]

    def store(self, _store_id: int) -> OneStoreClient:
        """The client."""
        return OneStoreClient(self)


class OneStoreClient:
    """As `StoreClient`: sends nothing in cancelled work."""

    def __init__(self, cluster: OneStore) -> None:
        self.store = cluster.store_description
        self._cluster = cluster

    def backup(self, request: brpb_pb2.BackupRequest, _regions: Sequence[Region]) -> Answers:
        """Take note of the request, and answer."""
        cancellation.check()
        self._cluster.requests.append(request)
        return Answers(self._cluster.answer(request))
