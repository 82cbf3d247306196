"""Announces the ingests of a command, and finds followers that do not read announcements."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from tikv_br import cancellation
from tikv_br.cluster.ingests import LEASE_SECONDS, Ingest
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import TikvBrError
from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster

log = logging.getLogger(__name__)

_SYNC_SERVICE: Final = "tikv-br-sync-"
_CDC_SERVICE: Final = "tikvcdc"


def foreign_followers(cluster: Cluster) -> list[str]:
    """Followers that do not read announcements: TiKV-CDC, and followers of older versions of tikv-br. Raises `ClusterError`, `EtcdError`."""
    ingests = cluster.ingests
    watching = ingests.followers()
    now = cluster.pd.tso() >> 18
    expires = {each.service: each.expires for each in gc_status(cluster.pd_http).services if each.expires * 1000 > now}
    services = list(expires)
    ours = [
        f"sync, changefeed or log {each.removeprefix(_SYNC_SERVICE)} of an older tikv-br (safe point {each})"
        for each in services
        if each.startswith(_SYNC_SERVICE) and each not in watching
    ]
    changefeeds = ingests.tikv_cdc()
    theirs = [f"changefeed {each} of TiKV-CDC" for each in changefeeds]
    if not changefeeds:  # it keeps its state in another etcd
        theirs = [
            f"TiKV-CDC (safe point {each}, which expires at {show_time(expires[each] * 1000, age=False)} unless it is renewed)"
            for each in services
            if each.startswith(_CDC_SERVICE)
        ]
    return [*ours, *theirs]


def own_followers(cluster: Cluster) -> list[str]:
    """Syncs, changefeeds and logs of tikv-br that read announcements. Raises `ClusterError`, `EtcdError`."""
    now = cluster.pd.tso() >> 18
    live = {each.service for each in gc_status(cluster.pd_http).services if each.expires * 1000 > now}
    return sorted(each.removeprefix(_SYNC_SERVICE) for each in cluster.ingests.followers() & live)


@dataclass(repr=False, eq=False)
class Announcer:
    """Announces one ingest from before its first file until after its last. `close` it in any case."""

    cluster: Cluster
    ingest: Ingest
    _revision: int = field(default=0, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)
    found_unfinished: bool = field(default=False, init=False)
    """True if this continues the announcement of an interrupted run of the same restore."""
    began: bool = field(default=False, init=False)
    """True once files may have been ingested."""

    @classmethod
    def start(cls, cluster: Cluster, command: str, restore: str, ranges: Iterable[KeyRange]) -> Announcer:
        """Announce that rows will come, or continue the unfinished announcement of an earlier run of `restore`, an id."""
        now, ingests = cluster.pd.tso(), cluster.ingests
        wanted = Ingest(f"{restore}-{secrets.token_hex(4)}", command, tuple(ranges), now)
        before = unfinished(ingests.read(), restore)
        if before is not None:
            wanted = replace(before, ranges=tuple(dict.fromkeys((*before.ranges, *wanted.ranges))))
        self = cls(cluster, wanted)
        self.found_unfinished = before is not None
        self._stack.enter_context(ingests.hold(wanted))
        self._revision = ingests.save(wanted)
        return self

    def begin(self, lowest_ts: int) -> None:
        """Record the lowest timestamp of the rows before the first file is ingested; see `Ingest.lowest_ts`."""
        before = self.ingest.lowest_ts
        self.ingest = replace(self.ingest, lowest_ts=lowest_ts if before is None else min(before, lowest_ts))
        self._revision = self.cluster.ingests.save(self.ingest)
        self.began = True

    def finish(self) -> None:
        """Record that no more rows come, and finish the announcements of killed commands."""
        now, ingests = self.cluster.pd.tso(), self.cluster.ingests
        ingests.finish(self.ingest, self._revision, now)
        self.close()
        try:
            finish_killed(self.cluster)
        except TikvBrError as error:  # the next ingest does it
            log.warning("cannot clean up after earlier ingests: %s", error.message)

    def abandon(self) -> None:
        """End without a result. Followers wait for rows that may have come, until a resumed restore or another one finishes this."""
        try:
            if not self.began and not self.found_unfinished:
                self.cluster.ingests.withdraw(self.ingest)
        finally:
            self.close()

    def close(self) -> None:
        """End the lease. Idempotent."""
        self._stack.close()


def finish_killed(cluster: Cluster, restores: Collection[str] = ()) -> None:
    """Finish the announcements of killed commands, so that followers go on; see `Ingests.clean_up`. Raises `ClusterError`, `EtcdError`.

    `restores` are ids of killed ones. If the cluster has followers, the ends of their leases are waited for: until then, stores may
    execute their last requests.
    """
    until = time.monotonic() + 2 * LEASE_SECONDS
    while True:
        gc, ingests = gc_status(cluster.pd_http), cluster.ingests
        services = {each.service for each in gc.services}
        killed = () if ingests.followers() & services else restores
        ingests.clean_up(cluster.pd.tso(), gc.safe_point, services, killed)
        found = ingests.read() if restores else ()
        left = [str(each) for restore in restores if (each := unfinished(found, restore)) is not None]
        if not left or time.monotonic() > until:
            break
        log.info("waiting for the last requests of %s", ", ".join(left))
        cancellation.sleep(1.0)
    if left:
        log.warning("%s is still running: followers wait for its end", ", ".join(left))


def unfinished(found: Iterable[Ingest], restore: str) -> Ingest | None:
    """The unfinished announcement of a restore."""
    mine = (each for each in found if each.id.startswith(f"{restore}-") and not each.finished_ts)
    return next(mine, None)


def kept_until(cluster: Cluster) -> int:
    """The newest timestamp at which an ingest ended whose rows keep their timestamps; 0 = none, or etcd does not answer."""
    try:
        return max((each.finished_ts for each in cluster.watched_ingests.read() if each.lowest_ts == 0), default=0)
    except TikvBrError as error:
        log.debug("cannot read the announcements of ingests: %s", error.message)
        return 0
