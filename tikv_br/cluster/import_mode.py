"""Import mode of all stores, with PD's balancing paused: held for as long as a work runs.

In import mode a store compacts later and stalls no ingest; its foreground work suffers. Both end by themselves soon after their
holder was killed: a paused scheduler goes on after `PAUSE_SECONDS`, a store is back in normal mode after its
``import.import-mode-timeout``, ten minutes by default.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable

from tikv_br.cluster import retry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.errors import ClusterError, ClusterUnreachable

PAUSE_SECONDS = 300
_RENEWALS_PER_PAUSE = 3
_MOVERS = frozenset(
    f"{kind}-scheduler"
    for kind in (
        "balance-leader",
        "balance-region",
        "balance-hot-region",
        "shuffle-leader",
        "shuffle-region",
        "shuffle-hot-region",
    )
)
"""Schedulers that move regions and leaders about for the sake of balance."""

log = logging.getLogger(__name__)


class ImportMode:
    """Call `enter` and, however the work ends, `leave`."""

    def __init__(self, cluster: Cluster, schedulers: Iterable[str], pause_seconds: int = PAUSE_SECONDS) -> None:
        """``schedulers`` are those to pause; see `running_movers`."""
        self._cluster = cluster
        self.schedulers = sorted(schedulers)
        self._pause = pause_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="import-mode", daemon=True)

    def enter(self) -> None:
        """Switch every store, pause the schedulers, and keep it so. Raises `ClusterError` when a store stays away."""
        backoffer = self._cluster.router.backoffer("import mode")
        while True:
            try:
                self._set(importing=True)
            except ClusterUnreachable as error:
                backoffer.wait(retry.STORE_UNREACHABLE, error)
                continue
            break
        self._thread.start()

    def leave(self) -> bool:
        """Put everything back; idempotent. What does not answer goes back by itself: that is logged, and False returned."""
        self.stop()
        try:
            self._set(importing=False)
        except ClusterError as error:
            log.warning("import mode or a pause of PD's schedulers lasts for up to ten minutes: %s", error.message)
            return False
        return True

    def stop(self) -> None:
        """Keep it so no longer, and change nothing: another has taken over."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        while not self._stopping.wait(self._pause / _RENEWALS_PER_PAUSE):
            with contextlib.suppress(ClusterError):  # the next renewal is in time as well
                self._set(importing=True)

    def _set(self, *, importing: bool) -> None:
        """Tell PD and every store, also those that follow one that fails; raises the last failure."""
        failure: ClusterError | None = None
        mode = import_sstpb_pb2.Import if importing else import_sstpb_pb2.Normal
        pd = self._cluster.pd_http
        for name in self.schedulers:
            try:
                pd.pause_scheduler(name, self._pause if importing else 0)
            except ClusterError as error:
                failure = error
        for store in self._cluster.pd.stores():
            if not store.serves:
                continue
            try:
                self._cluster.store(store.id).switch_mode(mode)
            except ClusterError as error:
                failure = error
        if failure is not None:
            raise failure


def running_movers(cluster: Cluster) -> list[str]:
    """The schedulers that move regions about and are not paused by others. Raises `ClusterError`."""
    paused = set(cluster.pd_http.schedulers(paused=True))
    return [name for name in cluster.pd_http.schedulers() if name in _MOVERS and name not in paused]
