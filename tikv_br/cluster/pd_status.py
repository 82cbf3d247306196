"""The state of a cluster as PD's HTTP API shows it to operators: stores and their disks, members, GC, schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tikv_br.errors import RequestRefused

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTPE]?)(?:i?B)?")
_POWERS = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
GC_WORKER = "gc_worker"
"""The name under which GC itself has an entry among the services."""


class Documents(Protocol):
    """What is needed of `PdHttp`."""

    def document(self, path: str) -> object:
        """The JSON document at a path below ``/pd/api/v1``. Raises `ClusterError`."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store that is not gone for good, as PD hears of it."""

    id: int
    address: str
    version: str
    """Without a leading ``v``."""
    state: str
    """``Up``, ``Offline`` (on its way out), ``Disconnected`` (20 s of silence) or ``Down`` (half an hour)."""
    capacity: int
    """Bytes of its disk; 0 = PD does not know."""
    available: int
    """Bytes left."""
    is_tiflash: bool


@dataclass(frozen=True, slots=True)
class ServiceSafePoint:
    """A service that holds GC back."""

    service: str
    safe_point: int
    expires: int
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class GcStatus:
    """How far GC went, and who holds it."""

    safe_point: int
    services: tuple[ServiceSafePoint, ...]
    """Without GC itself."""


def store_statuses(pd: Documents) -> list[StoreStatus]:
    """All stores, TiFlash too."""
    return [_store(item) for item in _object(pd, "/stores").get("stores") or ()]


def member_health(pd: Documents) -> dict[str, bool]:
    """Whether each PD is well, by name."""
    members = cast("Iterable[dict[str, Any]]", pd.document("/health") or ())
    return {str(member.get("name", "")): bool(member.get("health")) for member in members}


def gc_status(pd: Documents) -> GcStatus:
    """GC's safe point and those of services."""
    document = _object(pd, "/gc/safepoint")
    services = (
        ServiceSafePoint(item["service_id"], int(item["safe_point"]), int(item["expired_at"]))
        for item in document.get("service_gc_safe_points") or ()
    )
    held = tuple(each for each in services if each.service != GC_WORKER)
    return GcStatus(int(document.get("gc_safe_point", 0)), held)


def merges_regions(pd: Documents) -> bool:
    """Whether small regions are merged: tools that import switch it off for a while by a size of 0."""
    return int(_object(pd, "/config/schedule").get("max-merge-region-size", 1)) > 0


def parse_size(text: str) -> int:
    """Bytes of ``1.8TiB``, ``98.2GiB`` or ``0B``, as PD writes them. Raises `RequestRefused`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RequestRefused(f"PD: {text!r} is no size")
    return int(float(found[1]) * 1024 ** _POWERS[found[2]])


def _store(item: dict[str, Any]) -> StoreStatus:
    store, status = item["store"], item.get("status") or {}
    labels = {(label.get("key"), label.get("value")) for label in store.get("labels") or ()}
    return StoreStatus(
        id=int(store["id"]),
        address=str(store.get("address", "")),
        version=str(store.get("version", "")).removeprefix("v"),
        state=str(store.get("state_name", "")),
        capacity=parse_size(str(status.get("capacity", "0B"))),
        available=parse_size(str(status.get("available", "0B"))),
        is_tiflash=bool({("engine", "tiflash"), ("engine", "tiflash_compute")} & labels),
    )


def _object(pd: Documents, path: str) -> dict[str, Any]:
    document = pd.document(path)
    if not isinstance(document, dict):
        raise RequestRefused(f"PD {path}: the answer is no object")
    return document
