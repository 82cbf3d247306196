"""A limit to how fast stores download SSTs, held for as long as a work runs.

Stores forget it by themselves soon after its holder was killed. Those of older versions, which know neither its name nor its
end, keep it until another restore sets it, as with the Go tool.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from tikv_br.cluster import retry
from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import ClusterError, ClusterUnreachable

TTL_SECONDS = 180
_RENEWALS_PER_TTL = 3

log = logging.getLogger(__name__)


class DownloadLimit:
    """Limits every store that holds data; call `start` and, however the work ends, `stop`."""

    def __init__(self, cluster: Cluster, bytes_per_second: int, task_id: str, ttl_seconds: int = TTL_SECONDS) -> None:
        """``task_id`` is the limit's name at the stores; the smallest of all names' limits counts there."""
        self._cluster = cluster
        self._rate = bytes_per_second
        self._task_id = task_id
        self._ttl = ttl_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="download-limit", daemon=True)

    def start(self) -> None:
        """Set the limit, then renew it in the background. Raises `ClusterError` when a store stays away."""
        backoffer = self._cluster.router.backoffer("limit of downloads")
        while True:
            try:
                self._set(self._rate)
            except ClusterUnreachable as error:
                backoffer.wait(retry.STORE_UNREACHABLE, error)
                continue
            break
        self._thread.start()

    def stop(self) -> None:
        """Lift the limit; idempotent. A store that does not answer forgets it by itself, which is logged."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._set(0)
        except ClusterError as error:
            log.warning("a store keeps its download limit for up to %d s: %s", self._ttl, error.message)

    def _keep(self) -> None:
        while not self._stopping.wait(self._ttl / _RENEWALS_PER_TTL):
            with contextlib.suppress(ClusterError):  # the next renewal is in time as well
                self._set(self._rate)

    def _set(self, bytes_per_second: int) -> None:
        """Tell every store, also those that follow one that fails; raises the last failure."""
        failure: ClusterError | None = None
        for store in self._cluster.pd.stores():
            if not store.serves:
                continue
            try:
                self._cluster.store(store.id).set_download_speed_limit(
                    bytes_per_second, task_id=self._task_id, ttl_seconds=self._ttl if bytes_per_second else 0
                )
            except ClusterError as error:
                failure = error
        if failure is not None:
            raise failure
