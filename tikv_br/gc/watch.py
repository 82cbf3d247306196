"""State of a GC worker: its status as JSON, its metrics, and its health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tikv_br import __version__
from tikv_br.gc.metrics import WorkerFigures, collect
from tikv_br.gc.status import GcReport
from tikv_br.gc.worker import WorkerOptions
from tikv_br.redaction import redact
from tikv_br.web.metrics import process_registry

PATIENCE_SECONDS = 60.0
"""Seconds of failing attempts, or delay of a round, before the worker is unhealthy: elections must fit in."""


class WorkerWatch:
    """Last state of the worker; a `Reporter` of ``tikv_br.web.status``. Thread-safe."""

    def __init__(
        self,
        name: str,
        options: WorkerOptions,
        describe: Callable[[GcReport | None], dict[str, object]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` gives a report as JSON fields."""
        self._name, self._options, self._describe, self._clock = name, options, describe, clock
        self._lock = threading.Lock()
        self._report: GcReport | None = None
        self._figures = WorkerFigures()
        self._bad_since: float | None = clock()
        """Time since which it neither leads nor waits for a leader, or fails to do a round; None = it does its work."""
        self._last_round = 0.0
        self.metrics = process_registry(lambda: collect(*self._current()))

    def show(self, found: GcReport | None, figures: WorkerFigures) -> None:
        """Take what the worker shows; see `worker.Show`."""
        now = self._clock()
        with self._lock:
            has_succeeded = figures.rounds > self._figures.rounds
            begins = figures.is_leader and not self._figures.is_leader
            if has_succeeded or begins:  # the first round may take long: it asks every region
                self._last_round = now
            # The last state of GC is shown, with its time, for as long as this worker leads.
            self._report = found or (self._report if figures.is_leader else None)
            has_failed, self._figures = bool(self._figures.error), figures
            if has_succeeded or figures.waits_for or (begins and not has_failed):
                self._bad_since = None
            elif self._bad_since is None:
                self._bad_since = now

    def status(self) -> dict[str, object]:
        """Return the state of the worker, its figures, and the state of GC if it leads."""
        with self._lock:
            report, figures = self._report, self._figures
        problems, degraded = self.problems(), self.degradations()
        return {
            "version": __version__,
            "now_ms": time.time_ns() // 1_000_000,
            "healthy": not problems,
            "degraded": bool(degraded),
            "trouble": "; ".join(problems or degraded),
            "name": self._name,
            "leads": figures.is_leader,
            "waits_for": figures.waits_for,
            "revision": figures.revision,
            "rounds": figures.rounds,
            "failures": figures.failures,
            "life_time": self._options.life_time,
            "interval": self._options.interval,
            **self._describe(report),
        }

    def problems(self) -> list[str]:
        """Return why it is unhealthy, if it has not done its work for `PATIENCE_SECONDS`."""
        return [text for text, seconds in self._troubles() if seconds > PATIENCE_SECONDS]

    def degradations(self) -> list[str]:
        """Return the problems that are being retried."""
        return [text for text, seconds in self._troubles() if seconds <= PATIENCE_SECONDS]

    def _troubles(self) -> list[tuple[str, float]]:
        """Return the current problem as text, with its duration in seconds; at most one."""
        now = self._clock()
        with self._lock:
            figures, bad_since, last_round = self._figures, self._bad_since, self._last_round
        if bad_since is not None:
            what = "no round has succeeded" if figures.is_leader else "not in the election"
            cause = f": {redact(figures.error)}" if figures.error else ""
            return [(f"{what} for {now - bad_since:.0f} s{cause}", now - bad_since)]
        late = now - last_round - self._options.interval
        if figures.is_leader and late > PATIENCE_SECONDS:
            return [(f"the next round is late by {late:.0f} s", late)]
        return []

    def _current(self) -> tuple[GcReport | None, WorkerFigures | None]:
        with self._lock:
            return self._report, self._figures
