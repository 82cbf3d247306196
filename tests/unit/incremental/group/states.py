"""Pictures of a group, for tests of what is decided by them."""

from __future__ import annotations

from collections.abc import Iterable

from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.regions import Region
from tikv_br.incremental.group.model import CaptureInfo, ChangefeedInfo, ChangefeedState, ChangefeedTask, GroupState


def capture(name: str) -> CaptureInfo:
    """A capture."""
    return CaptureInfo(name, "", 0, "1", write_timeout_ms=3000)


def changefeed(name: str, state: ChangefeedState = ChangefeedState.NORMAL) -> ChangefeedInfo:
    """A changefeed."""
    return ChangefeedInfo(name, "blackhole://", 0, b"", b"", start_ts=1, created_ms=1, state=state)


def state_of(
    captures: Iterable[str], changefeeds: Iterable[ChangefeedInfo], tasks: Iterable[ChangefeedTask]
) -> GroupState:
    """Contents of etcd."""
    return GroupState(
        revision=1,
        captures={name: capture(name) for name in captures},
        owner="",
        changefeeds={each.id: each for each in changefeeds},
        tasks={each.id: each for each in tasks},
        progress={},
        statuses={},
        items={},
    )


SERVICE = "tikv-br-sync-feed"


class SafePointBook(PdClient):
    """A book of safe points, and no borders of regions."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, int]] = {}

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """See `PdClient`."""
        if ttl_seconds:
            self.held[service_id] = safe_point, ttl_seconds
        else:
            self.held.pop(service_id, None)
        return 0

    def gc_safe_point(self) -> int:
        """See `PdClient`."""
        return 0

    def tso(self) -> int:
        """See `OwnerPd`."""
        return 1 << 50

    def scan_regions(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """See `PdClient`."""
        return []
