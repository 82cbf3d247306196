"""What the errors of a subscription mean: what is learned from each, and the wait before the next try."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster import retry
from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
from tikv_br.cluster.region_errors import REACTIONS
from tikv_br.cluster.regions import Region, RegionCache
from tikv_br.cluster.retry import Backoff
from tikv_br.cluster.router import take_hint, take_regions
from tikv_br.errors import ClusterUnfit


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a part of the span is not delivered, and when to try again."""

    kind: str
    cause: str
    backoff: Backoff
    at_least: float = 0.0
    """Seconds that the server asked for."""
    at_once: bool = False
    """Whether a first try needs no wait: we were told where to go."""
    breaks_stream: bool = False
    """Whether the whole stream must go: the store and we disagree on what is subscribed."""


def learn(regions: RegionCache, region: Region, error: cdcpb_pb2.Error) -> Trouble:
    """Take from the error what it says of regions. Raises `ClusterUnfit` where no other try can help."""
    kind = next((field.name for field, _ in error.ListFields()), "")
    cause = f"region {region.id}: {kind or 'an error without a kind'}"
    match kind:
        case "not_leader":
            named = take_hint(regions, region, error.not_leader)
            return Trouble(kind, cause, REACTIONS[kind].backoff, at_once=named)
        case "epoch_not_match":
            take_regions(regions, region, error.epoch_not_match)
            return Trouble(kind, cause, REACTIONS[kind].backoff, at_once=bool(error.epoch_not_match.current_regions))
        case "server_is_busy":
            return Trouble(kind, _busy(cause, error.server_is_busy), REACTIONS[kind].backoff, _asked(error))
        case "congested":
            return Trouble(kind, cause, retry.STORE_BUSY)
        case "duplicate_request":
            return Trouble(kind, cause, retry.REGION_MISS, breaks_stream=True)
        case "compatibility":
            raise ClusterUnfit(
                f"{cause}: the store has no RawKV feed, or wants a client of {error.compatibility.required_version}",
                hint="Changes can be followed on clusters of API V2 only.",
            )
        case "cluster_id_mismatch":
            raise ClusterUnfit(
                f"{cause}: the store belongs to cluster {error.cluster_id_mismatch.current}, "
                f"not to {error.cluster_id_mismatch.request}",
                hint="Check --pd: the stores that it names belong to another cluster.",
            )
        case _:  # region_not_found, or nothing that we know
            regions.invalidate(region.id)
            return Trouble(kind or "unknown", cause, retry.REGION_MISS)


def _busy(cause: str, error: errorpb_pb2.ServerIsBusy) -> str:
    return f"{cause}: {error.reason}" if error.reason else cause


def _asked(error: cdcpb_pb2.Error) -> float:
    return error.server_is_busy.backoff_ms / 1000
