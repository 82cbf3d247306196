"""Settings of a running restore, reset when it ends: import mode of stores, PD's balancing paused, download limits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from tikv_br import cancellation, retry
from tikv_br.cancellation import BackgroundWork
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.errors import ClusterError, ClusterUnreachable

PAUSE_SECONDS = 300
_RENEWALS_PER_PAUSE = 3
_BALANCE_SCHEDULERS = frozenset(
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
        """``schedulers`` are those to pause; see `active_balance_schedulers`. Others, as from a foreign record, are left alone."""
        self._cluster = cluster
        self.schedulers = sorted(_BALANCE_SCHEDULERS.intersection(schedulers))
        self._pause = pause_seconds
        self._renewal = BackgroundWork("import-mode", self._keep)

    def enter(self) -> None:
        """Switch every store, pause the schedulers, and renew both. Raises `ClusterError` if a store does not answer."""
        policy = self._cluster.config.retry
        policy.run("import mode", lambda: self._set(importing=True), retry.STORE_UNREACHABLE, ClusterUnreachable)
        self._renewal.start()

    def leave(self) -> None:
        """Undo `enter`; idempotent. Raises `ClusterError` if a store or PD does not answer: import mode then times out."""
        self.stop()
        try:
            self._set(importing=False)
        except ClusterError as error:
            message = f"import mode or PD's paused schedulers remain, and end within ten minutes: {error.message}"
            raise type(error)(message, hint=error.hint) from None

    def stop(self) -> None:
        """Stop renewing without changing the cluster: another restore has taken over."""
        self._renewal.stop()

    def _keep(self) -> None:
        while True:
            cancellation.sleep(self._pause / _RENEWALS_PER_PAUSE)
            with contextlib.suppress(ClusterError):  # the next renewal is in time as well
                self._set(importing=True)

    def _set(self, *, importing: bool) -> None:
        """Call PD and every store, even after a failure; raises the last failure."""
        failure: ClusterError | None = None
        mode = import_sstpb_pb2.Import if importing else import_sstpb_pb2.Normal
        pd = self._cluster.pd_http
        for name in self.schedulers:
            try:
                pd.pause_scheduler(name, self._pause if importing else 0)
            except ClusterError as error:
                failure = error
        for store in self._cluster.stores(known=not importing):
            try:
                self._cluster.store(store.id).switch_mode(mode)
            except ClusterError as error:
                failure = error
        if failure is not None:
            raise failure


def active_balance_schedulers(cluster: Cluster) -> list[str]:
    """The schedulers that move regions about and are not paused by others. Raises `ClusterError`."""
    paused = set(cluster.pd_http.schedulers(paused=True))
    return [name for name in cluster.pd_http.schedulers() if name in _BALANCE_SCHEDULERS and name not in paused]


TTL_SECONDS = 60
"""Seconds after which stores that support it drop a limit."""
RENEW_SECONDS = 5.0
"""Seconds for which another client's change of a limit can stay in effect."""


class DownloadLimit:
    """Limits every store that holds data; call `start` and, however the work ends, `stop`."""

    def __init__(
        self, cluster: Cluster, bytes_per_second: int, task_id: str, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        """0 ``bytes_per_second`` is unlimited: then `start` removes an earlier limit, and `stop` changes nothing.

        ``task_id`` is the limit's name at stores that know names: there the smallest of all names' limits counts.
        """
        self._cluster = cluster
        self._rate = bytes_per_second
        self._task_id = task_id
        self._renew_seconds = renew_seconds
        self._renewal = BackgroundWork("download-limit", self._keep)

    def start(self) -> None:
        """Set the limit, then renew it in the background. Raises `ClusterError` if a store does not answer, unless unlimited."""
        if not self._rate:
            try:
                self._set(0)
            except ClusterError as error:
                log.warning("a store may keep the download limit of an earlier restore: %s", error.message)
            return
        policy = self._cluster.config.retry
        policy.run("download limit", lambda: self._set(self._rate), retry.STORE_UNREACHABLE, ClusterUnreachable)
        self._renewal.start()

    def stop(self) -> None:
        """Lift the limit; idempotent. Raises `ClusterError` if a store does not answer: it may keep the limit."""
        self._renewal.stop()
        if not self._rate:
            return
        try:
            self._set(0)
        except ClusterError as error:
            message = f"a store may keep its download limit until the next restore starts: {error.message}"
            raise type(error)(message, hint=error.hint) from None

    def _keep(self) -> None:
        while True:
            cancellation.sleep(self._renew_seconds)
            with contextlib.suppress(ClusterError):  # the next renewal is in time as well
                self._set(self._rate)

    def _set(self, bytes_per_second: int) -> None:
        """Call every store, even after a failure; raises the last failure."""
        failure: ClusterError | None = None
        for store in self._cluster.stores(known=not bytes_per_second):
            try:
                self._cluster.store(store.id).set_download_speed_limit(
                    bytes_per_second, task_id=self._task_id, ttl_seconds=TTL_SECONDS if bytes_per_second else 0
                )
            except ClusterError as error:
                failure = error
        if failure is not None:
            raise failure
