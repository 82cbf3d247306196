"""PD's gRPC: time, stores, regions, safe points and keyspaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from tikv_br import retry
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import keyspacepb_pb2, pdpb_pb2
from tikv_br.cluster.pd_connection import Leader, PdConnection
from tikv_br.cluster.pd_http import GcBarrier, GcStatus, PdHttp, gc_status
from tikv_br.cluster.regions import Region
from tikv_br.cluster.timestamps import compose
from tikv_br.cluster.topology import Store
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, RequestRefused, UsageError
from tikv_br.formats.api_version import V3_REFUSED
from tikv_br.formats.keys.text import show_key

NULL_KEYSPACE = 0xFFFF_FFFF
"""The keyspace id that PD uses for the whole cluster."""
SCAN_PAGE = 1024
"""Regions that one ScanRegions asks for."""


class Operator(Struct, frozen=True):
    """A PD operator: the current or last action on a region, such as ``scatter-region``."""

    desc: str
    running: bool


class PdClient:
    """A cluster's PD. Every call raises `ClusterError` after ``config.retry_budget`` seconds of failures. Thread-safe.

    Keys are physical bounds as PD holds them (`tikv_br.formats.keys.codec.KeyCodec.bound`); an empty end is no end.
    """

    def __init__(self, config: ClusterConfig) -> None:
        """Connect. Raises as `PdConnection`."""
        self.connection = PdConnection(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    @property
    def cluster_id(self) -> int:
        return self.connection.cluster_id

    def tso(self) -> int:
        """A fresh timestamp. See `timestamps`."""

        def send(leader: Leader) -> int:
            answers = leader.pd.Tso(iter((request,)), timeout=self.connection.request_seconds)
            try:
                for answer in answers:  # the last of `count` timestamps
                    return compose(answer.timestamp.physical, answer.timestamp.logical) - answer.count + 1
            finally:
                answers.cancel()
            raise ClusterUnreachable(f"PD {leader.address}: the timestamp stream ended")

        request = pdpb_pb2.TsoRequest(count=1)
        request.header.cluster_id = self.cluster_id
        return self.connection.call(send, "PD Tso")

    # Stores

    def stores(self) -> list[Store]:
        """All stores, also offline ones and TiFlash, but none that is gone."""
        request = pdpb_pb2.GetAllStoresRequest(exclude_tombstone_stores=True)
        response = self.connection.unary(lambda leader: leader.pd.GetAllStores, request)
        return [Store.of(store) for store in response.stores]

    def store(self, store_id: int) -> Store:
        """One store. Raises `RequestRefused` for an unknown id."""
        request = pdpb_pb2.GetStoreRequest(store_id=store_id)
        return Store.of(self.connection.unary(lambda leader: leader.pd.GetStore, request).store)

    # Regions

    def region_by_key(self, bound: bytes) -> Region:
        """The region of a key. Waits, within the retry budget, while PD knows none."""
        response = self.connection.unary(
            lambda leader: leader.pd.GetRegion,
            pdpb_pb2.GetRegionRequest(region_key=bound),
            missing_of=lambda answer: (
                None if answer.HasField("region") else f"no region contains key {show_key(bound)}"
            ),
        )
        return Region.of(response.region, response.leader)

    def region_by_id(self, region_id: int) -> Region | None:
        """A region by its id; None when PD knows none: merged away, or too new."""
        request = pdpb_pb2.GetRegionByIDRequest(region_id=region_id)
        response = self.connection.unary(
            lambda leader: leader.pd.GetRegionByID, request, allow=[pdpb_pb2.REGION_NOT_FOUND]
        )
        return Region.of(response.region, response.leader) if response.HasField("region") else None

    def scan_regions(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """The regions that cover [start, end), in order and without gaps; the first and last may reach beyond.

        `limit` ends the list after so many; 0 does not. Regions may split and merge while the pages come in: where a
        later page contradicts an earlier one, the later counts. Waits, within the retry budget, while PD's picture has
        a gap.
        """
        found: list[Region] = []
        with retry.Backoffer("PD ScanRegions", self.connection.config.retry) as backoffer:
            while not _covers(found, start, end, limit):
                cursor = found[-1].end if found else start
                if not _extend(found, self._scan_page(cursor, end, limit), start):
                    backoffer.wait(retry.REGION_MISS, f"PD reports no region after {show_key(cursor) or 'the start'}")
        return found[:limit] if limit else found

    def each_region(self, start: bytes, end: bytes) -> Iterator[Region]:
        """Yield regions as `scan_regions` returns them, one page in memory.

        A region that grew between two pages may overlap the one before.
        """
        while True:
            page = self.scan_regions(start, end, SCAN_PAGE)
            yield from page
            if not page or not page[-1].end or (end and page[-1].end >= end):
                return
            start = page[-1].end

    def scatter(self, region_ids: Sequence[int]) -> list[int]:
        """Ask PD to spread these regions over the stores.

        Returns the ids that could not be: retry those a moment later. Follow the rest by `operator`.
        """
        request = pdpb_pb2.ScatterRegionRequest(regions_id=region_ids, retry_limit=5, skip_store_limit=True)
        response = self.connection.unary(lambda leader: leader.pd.ScatterRegion, request)
        return list(response.failed_regions_id)

    def operator(self, region_id: int) -> Operator | None:
        """Return the current or last operator of a region; None if there is none or PD has forgotten it."""
        request = pdpb_pb2.GetOperatorRequest(region_id=region_id)
        response = self.connection.unary(
            lambda leader: leader.pd.GetOperator, request, allow=[pdpb_pb2.REGION_NOT_FOUND]
        )
        if response.header.error.type == pdpb_pb2.REGION_NOT_FOUND:
            return None
        return Operator(desc=response.desc.decode(errors="replace"), running=response.status == pdpb_pb2.RUNNING)

    # Safe points

    def gc_safe_point(self) -> int:
        """The timestamp below which GC may remove old versions."""
        request = pdpb_pb2.GetGCSafePointRequest()
        return self.connection.unary(lambda leader: leader.pd.GetGCSafePoint, request).safe_point

    def update_gc_safe_point(self, safe_point: int) -> int:
        """Let GC remove old versions below a timestamp; returns the GC safe point, which PD never moves back.

        PD before GC barriers does not compare it with the service safe points: see `tikv_br.gc.worker`.
        """
        request = pdpb_pb2.UpdateGCSafePointRequest(safe_point=safe_point)
        return self.connection.unary(lambda leader: leader.pd.UpdateGCSafePoint, request).new_safe_point

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """Register, renew or, with a TTL of 0, remove a service's safe point.

        Returns the minimum that holds now. A minimum above `safe_point` means that GC has passed it; PD calls that no
        error, `safepoint.protect` does.
        """
        request = pdpb_pb2.UpdateServiceGCSafePointRequest(
            service_id=service_id.encode(), TTL=ttl_seconds, safe_point=safe_point
        )
        return self.connection.unary(lambda leader: leader.pd.UpdateServiceGCSafePoint, request).min_safe_point

    def gc_barriers(self) -> tuple[GcBarrier, ...] | None:
        """Global and keyspace-level GC barriers; None if PD has no GC barriers at all (before 9.0).

        Raises `CallUnsupported` if it has them and cannot list these.
        """
        request = pdpb_pb2.GetAllKeyspacesGCStatesRequest()
        try:
            answer = self.connection.unary(lambda leader: leader.pd.GetAllKeyspacesGCStates, request)
        except CallUnsupported:
            state = pdpb_pb2.GetGCStateRequest(
                keyspace_scope=pdpb_pb2.KeyspaceScope(keyspace_id=NULL_KEYSPACE), exclude_gc_barriers=True
            )
            try:
                self.connection.unary(lambda leader: leader.pd.GetGCState, state)
            except CallUnsupported:
                return None
            raise
        found = [
            GcBarrier(each.barrier_id, each.barrier_ts, each.ttl_seconds, None) for each in answer.global_gc_barriers
        ]
        for keyspace in answer.gc_states:
            if (keyspace_id := keyspace.keyspace_scope.keyspace_id) != NULL_KEYSPACE:
                found += [
                    GcBarrier(each.barrier_id, each.barrier_ts, each.ttl_seconds, keyspace_id)
                    for each in keyspace.gc_barriers
                ]
        return tuple(found)

    # Keyspaces

    def gc_status(self) -> GcStatus:
        """All safe points, with global and keyspace-level GC barriers, or why they cannot be listed."""
        status = gc_status(PdHttp(self.connection))
        try:
            barriers = self.gc_barriers()
        except (CallUnsupported, RequestRefused) as error:
            return replace(status, has_barriers=True, unlisted=error.message)
        return status if barriers is None else replace(status, has_barriers=True, barriers=barriers)

    def keyspace_id(self, given: str) -> int:
        """The id of a keyspace that is given by its id or its name; ``""`` is the default one, 0.

        Raises `UsageError` when there is none of that name, `ClusterUnfit` for one of API V3.
        """
        if not given or (given.isascii() and given.isdigit()):
            return int(given or 0)
        response = self.connection.unary(
            lambda leader: leader.keyspace.LoadKeyspace,
            keyspacepb_pb2.LoadKeyspaceRequest(name=given),
            allow=[pdpb_pb2.ENTRY_NOT_FOUND],
        )
        if response.header.error.type == pdpb_pb2.ENTRY_NOT_FOUND:
            raise UsageError(
                f"the cluster has no keyspace {given!r}", hint="Pass the name or the id of a keyspace that PD knows."
            )
        if response.keyspace.HasField("keyspace_identity"):
            raise ClusterUnfit(
                f"keyspace {given!r} has an identity instead of an id: {V3_REFUSED}",
                hint="Use a keyspace of API V2, which has an id.",
            )
        return response.keyspace.id

    def keyspace_name(self, keyspace_id: int) -> str | None:
        """The name of a keyspace; ``""`` = PD has none of that id, None = this PD cannot tell."""
        try:
            response = self.connection.unary(
                lambda leader: leader.keyspace.GetAllKeyspaces,
                keyspacepb_pb2.GetAllKeyspacesRequest(start_id=keyspace_id, limit=1),
            )
        except CallUnsupported:
            return None
        return next((each.name for each in response.keyspaces if each.id == keyspace_id), "")

    def _scan_page(self, start: bytes, end: bytes, limit: int) -> list[Region]:
        page = min(limit, SCAN_PAGE) if limit else SCAN_PAGE
        request = pdpb_pb2.ScanRegionsRequest(start_key=start, end_key=end, limit=page)
        response = self.connection.unary(lambda leader: leader.pd.ScanRegions, request)
        return [Region.of(item.region, item.leader) for item in response.regions]


def _covers(found: Sequence[Region], start: bytes, end: bytes, limit: int) -> bool:
    if end and start >= end:
        return True
    if not found:
        return False
    return not found[-1].end or bool(end and found[-1].end >= end) or bool(limit and len(found) >= limit)


def _extend(found: list[Region], page: Sequence[Region], start: bytes) -> bool:
    """Append a page to what was found from `start` on; False when it leaves a gap or brings nothing."""
    for region in page:
        while found and (not found[-1].end or found[-1].end > region.start):
            found.pop()
        if region.start > (found[-1].end if found else start):
            return False
        found.append(region)
    return bool(page)
