"""What syncs report on ``--status-addr``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from tikv_br import __version__
from tikv_br.incremental.watch.metrics import collect
from tikv_br.incremental.watch.status import StatusSource
from tikv_br.storage.crypter import SecretText
from tikv_br.web import metrics
from tikv_br.web.address import Address
from tikv_br.web.server import listening
from tikv_br.web.status import NO_KEY, StatusApi

MAX_LAG = 300.0


class SyncReporter:
    """Reports all syncs of this process: a `Reporter`."""

    def __init__(self, statuses: StatusSource, max_lag: float) -> None:
        self._statuses, self._max_lag = statuses, max_lag
        self.metrics = metrics.process_registry(lambda: collect(statuses(), max_lag))

    def status(self) -> dict[str, object]:
        syncs = []
        for each in self._statuses():
            figures = asdict(each.status) if each.status is not None else None
            problem, degraded = each.problem(self._max_lag), each.degraded
            ends = {"source": each.source, "sink": each.sink}
            syncs.append({"name": each.name, **ends, "trouble": problem, "degraded": degraded, "status": figures})
        healthy = not any(each["trouble"] for each in syncs)
        now_ms = time.time_ns() // 1_000_000
        return {
            "version": __version__,
            "now_ms": now_ms,
            "max_lag": self._max_lag,
            "healthy": healthy,
            "degraded": any(each["degraded"] for each in syncs),
            "syncs": syncs,
        }

    def problems(self) -> list[str]:
        return [f"{each.name}: {problem}" for each in self._statuses() if (problem := each.problem(self._max_lag))]

    def degradations(self) -> list[str]:
        return [f"{each.name}: {each.degraded}" for each in self._statuses() if each.degraded]


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve the status of syncs until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    """
    with listening(address, StatusApi(SyncReporter(statuses, max_lag), key, address).answer) as chosen:
        yield chosen
