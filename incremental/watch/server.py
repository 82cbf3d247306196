"""The HTTP server of ``--status-addr``: ``/`` (a page), ``/status``, ``/history``, ``/healthz`` and ``/metrics``.

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
from urllib.parse import parse_qs, urlsplit

from tikv_br import __version__
from tikv_br.incremental.watch.address import Address
from tikv_br.incremental.watch.metrics import Metrics
from tikv_br.incremental.watch.status import History, Point, StatusSource
from tikv_br.incremental.watch.web import HTML, JSON, TEXT, HttpRequest, HttpResponse, is_bearer, listening
from tikv_br.storage.crypter import SecretText

MAX_LAG = 300.0
NO_KEY = SecretText()
"""No key is required."""
PUBLIC_PATHS = {"/", "/healthz"}
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


class StatusApi:
    """Answers requests about the syncs of this process. Thread-safe."""

    def __init__(self, statuses: StatusSource, history: History, max_lag: float, key: SecretText) -> None:
        self._statuses, self._history, self._max_lag, self._key = statuses, history, max_lag, key
        self._metrics = Metrics(statuses, max_lag)
        self._page = resources.files("tikv_br.incremental.watch").joinpath("page.html").read_bytes()

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a GET."""
        url = urlsplit(request.target)
        authorized = is_bearer(request.header("Authorization"), self._key)
        if url.path not in PUBLIC_PATHS and not authorized:
            return KEY_REQUIRED
        match url.path:
            case "/":
                return HttpResponse(HTML, self._page, headers={"Content-Security-Policy": POLICY})
            case "/status":
                return HttpResponse(JSON, _json(self._status()))
            case "/history":
                return self._points(parse_qs(url.query).get("since", ["0"])[0])
            case "/healthz":
                return self._health(details=authorized)
            case "/metrics":
                return self._render_metrics(request.header("Accept"))
            case _:
                return HttpResponse(
                    TEXT, b"not found; paths: /, /status, /history, /healthz, /metrics\n", HTTPStatus.NOT_FOUND
                )

    def _status(self) -> dict[str, object]:
        syncs = []
        for each in self._statuses():
            figures = asdict(each.status) if each.status is not None else None
            problem, degraded = each.problem(self._max_lag), each.degraded
            syncs.append({"name": each.name, "trouble": problem, "degraded": degraded, "status": figures})
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

    def _points(self, since: str) -> HttpResponse:
        """The history as columns per sync, which is what the page plots."""
        if not _MILLISECONDS.fullmatch(since):
            return HttpResponse(TEXT, b"since= must be milliseconds since the epoch\n", HTTPStatus.BAD_REQUEST)
        columns = {
            name: {field: [getattr(point, field) for point in points] for field in Point.__dataclass_fields__}
            for name, points in self._history.since(int(since)).items()
        }
        return HttpResponse(JSON, _json(columns))

    def _render_metrics(self, accept: str) -> HttpResponse:
        try:
            return HttpResponse(*self._metrics.render(accept))
        except TypeError:  # raised by the Prometheus client if the version is not a number
            return HttpResponse(
                TEXT, b"the header Accept asks for an unsupported version of the text format\n", HTTPStatus.BAD_REQUEST
            )

    def _health(self, *, details: bool) -> HttpResponse:
        statuses = self._statuses()
        unhealthy = [f"{each.name}: {problem}" for each in statuses if (problem := each.problem(self._max_lag))]
        if unhealthy:
            text = "\n".join(unhealthy) if details else "unhealthy"
            return HttpResponse(TEXT, f"{text}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        degraded = [f"{each.name}: {each.degraded}" for each in statuses if each.degraded]
        if degraded:
            return HttpResponse(TEXT, "\n".join(["degraded", *(degraded if details else ()), ""]).encode())
        return HttpResponse(TEXT, b"ok\n")


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    """
    history = History(statuses)
    with listening(address, StatusApi(statuses, history, max_lag, key).answer) as chosen, history:
        yield chosen


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
