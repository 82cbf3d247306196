"""The HTTP server of ``--status-addr``: ``/status``, ``/healthz`` and ``/metrics``; of syncs also ``/`` (a page) and ``/history``.

Read-only. Listens on loopback unless another address is given. Figures need the key; without it, clients get the page (which
contains no figures) and the health status.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from importlib import resources
from typing import ClassVar, Protocol
from urllib.parse import SplitResult, parse_qs, urlsplit

from tikv_br import __version__
from tikv_br.incremental.watch.address import Address
from tikv_br.incremental.watch.metrics import Metrics
from tikv_br.incremental.watch.status import History, Point, StatusSource
from tikv_br.incremental.watch.web import HTML, JSON, TEXT, HttpRequest, HttpResponse, is_bearer, listening
from tikv_br.storage.crypter import SecretText

MAX_LAG = 300.0
NO_KEY = SecretText()
"""Key that allows everyone."""
_MILLISECONDS = re.compile(r"[0-9]{1,19}", re.ASCII)
# The page loads nothing from other sites, and no other site may frame it.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-ancestors 'none'"
)
KEY_REQUIRED = HttpResponse(
    TEXT,
    b"this path requires the status key; pass the header: Authorization: Bearer KEY\n",
    HTTPStatus.UNAUTHORIZED,
    {"WWW-Authenticate": 'Bearer realm="tikv-br"', "Content-Security-Policy": POLICY},
)


class Reporter(Protocol):
    """Status of a process for the status server. Called from any thread; must not raise."""

    def status(self) -> dict[str, object]:
        """The JSON of ``/status``."""

    def problems(self) -> list[str]:
        """Return the reasons why it is unhealthy, in lines; empty if it is healthy."""

    def degradations(self) -> list[str]:
        """Return the reasons why it may soon become unhealthy, in lines."""

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """Content type and text for Prometheus. Raises `TypeError` if `accept` asks for a version that is no number."""


class StatusApi:
    """Answers requests about this process. Thread-safe."""

    PATHS: ClassVar[tuple[str, ...]] = ("/status", "/healthz", "/metrics")
    PUBLIC_PATHS: ClassVar[frozenset[str]] = frozenset({"/healthz"})

    def __init__(self, reporter: Reporter, key: SecretText) -> None:
        self._reporter, self._key = reporter, key

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a GET."""
        url = urlsplit(request.target)
        authorized = is_bearer(request.header("Authorization"), self._key)
        if url.path not in self.PUBLIC_PATHS and not authorized:
            return KEY_REQUIRED
        match url.path:
            case "/status":
                return HttpResponse(JSON, _json(self._reporter.status()))
            case "/healthz":
                return self._health(details=authorized)
            case "/metrics":
                return self._render_metrics(request.header("Accept"))
            case _:
                return self._answer_more(url)

    def _answer_more(self, _url: SplitResult) -> HttpResponse:
        return HttpResponse(TEXT, f"not found; paths: {', '.join(self.PATHS)}\n".encode(), HTTPStatus.NOT_FOUND)

    def _render_metrics(self, accept: str) -> HttpResponse:
        try:
            return HttpResponse(*self._reporter.metrics(accept))
        except TypeError:  # raised by the Prometheus client if the version is not a number
            return HttpResponse(
                TEXT, b"the header Accept asks for an unsupported version of the text format\n", HTTPStatus.BAD_REQUEST
            )

    def _health(self, *, details: bool) -> HttpResponse:
        if problems := self._reporter.problems():
            text = "\n".join(problems) if details else "unhealthy"
            return HttpResponse(TEXT, f"{text}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        if degraded := self._reporter.degradations():
            return HttpResponse(TEXT, "\n".join(["degraded", *(degraded if details else ()), ""]).encode())
        return HttpResponse(TEXT, b"ok\n")


class SyncReporter:
    """Reports all syncs of this process: a `Reporter`."""

    def __init__(self, statuses: StatusSource, max_lag: float) -> None:
        self._statuses, self._max_lag = statuses, max_lag
        self._metrics = Metrics(statuses, max_lag)

    def status(self) -> dict[str, object]:
        """Each sync with its figures."""
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
        """A line for each unhealthy sync."""
        return [f"{each.name}: {problem}" for each in self._statuses() if (problem := each.problem(self._max_lag))]

    def degradations(self) -> list[str]:
        """A line for each degraded one."""
        return [f"{each.name}: {each.degraded}" for each in self._statuses() if each.degraded]

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """See `Metrics`."""
        return self._metrics.render(accept)


class SyncApi(StatusApi):
    """Answers requests about the syncs of this process, also with a page. Thread-safe."""

    PATHS = ("/", "/status", "/history", "/healthz", "/metrics")
    PUBLIC_PATHS = frozenset({"/", "/healthz"})

    def __init__(self, reporter: SyncReporter, history: History, key: SecretText) -> None:
        super().__init__(reporter, key)
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
        return HttpResponse(JSON, _json(columns))


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve the status of syncs until the end of the block; see `serve_api`."""
    history = History(statuses)
    with serve_api(address, SyncApi(SyncReporter(statuses, max_lag), history, key)) as chosen, history:
        yield chosen


@contextmanager
def serve_api(address: Address, api: StatusApi) -> Iterator[Address]:
    """Serve until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    """
    with listening(address, api.answer) as chosen:
        yield chosen


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
