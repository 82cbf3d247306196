"""The answers of syncs on ``--status-addr``: the paths of every process, ``/`` (a page) and ``/history``.

The page contains no figures, and needs no key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from importlib import resources
from urllib.parse import SplitResult, parse_qs

from tikv_br import __version__
from tikv_br.incremental.watch.metrics import collect
from tikv_br.incremental.watch.status import History, Point, StatusSource
from tikv_br.storage.crypter import SecretText
from tikv_br.web import metrics
from tikv_br.web.address import Address
from tikv_br.web.server import HTML, JSON, TEXT, HttpResponse, listening
from tikv_br.web.status import NO_KEY, POLICY, StatusApi, to_json

MAX_LAG = 300.0
_MILLISECONDS = re.compile(r"[0-9]{1,19}", re.ASCII)


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


class SyncApi(StatusApi):
    """Answers requests about the syncs of this process, also with a page. Thread-safe."""

    PATHS = ("/", "/status", "/history", "/healthz", "/metrics")
    PUBLIC_PATHS = frozenset({"/", "/healthz"})

    def __init__(self, reporter: SyncReporter, history: History, key: SecretText, address: Address) -> None:
        super().__init__(reporter, key, address)
        self._history = history
        self._page = resources.files("tikv_br.incremental.watch").joinpath("page.html").read_bytes()

    def _answer_more(self, url: SplitResult) -> HttpResponse:
        if url.path == "/":
            return HttpResponse(HTML, self._page, headers={"Content-Security-Policy": POLICY})
        if url.path == "/history":
            return self._points(parse_qs(url.query).get("since", ["0"])[0])
        return super()._answer_more(url)

    def _points(self, since: str) -> HttpResponse:
        """The history as columns per sync, which is what the page plots."""
        if not _MILLISECONDS.fullmatch(since):
            return HttpResponse(TEXT, b"since= must be milliseconds since the epoch\n", HTTPStatus.BAD_REQUEST)
        columns = {
            name: {field: [getattr(point, field) for point in points] for field in Point.__dataclass_fields__}
            for name, points in self._history.since(int(since)).items()
        }
        return HttpResponse(JSON, to_json(columns))


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve the status of syncs until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    .
    """
    history = History(statuses)
    api = SyncApi(SyncReporter(statuses, max_lag), history, key, address)
    with listening(address, api.answer) as chosen, history:
        yield chosen
