"""The status of a process over HTTP: ``/status``, ``/healthz`` and ``/metrics``.

Read-only. Figures need the key, if there is one; clients without it get the health status alone.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Protocol

from prometheus_client import CollectorRegistry

from tikv_br.storage.crypter import SecretText
from tikv_br.web import metrics
from tikv_br.web.address import Address
from tikv_br.web.server import JSON, TEXT, HttpRequest, HttpResponse, is_bearer

NO_KEY = SecretText()
"""Key that allows everyone."""
KEY_REQUIRED = HttpResponse(
    TEXT,
    b"this path requires the status key; pass the header: Authorization: Bearer KEY\n",
    HTTPStatus.UNAUTHORIZED,
    {"WWW-Authenticate": 'Bearer realm="tikv-br"'},
)
FOREIGN_HOST = HttpResponse(
    TEXT,
    b"the header Host does not name this server; use its address, or serve with a status key\n",
    HTTPStatus.FORBIDDEN,
)
"""Without a key: a web site could have its own name lead here, and read the answers (DNS rebinding)."""


class Reporter(Protocol):
    """The report of a process on itself. Called from any thread; must not raise."""

    def status(self) -> dict[str, object]:
        """The JSON of ``/status``."""

    def problems(self) -> list[str]:
        """Return why the process is unhealthy, in lines; empty if it is not."""

    def degradations(self) -> list[str]:
        """Return what may soon make the process unhealthy, in lines."""

    @property
    def metrics(self) -> CollectorRegistry:
        """The metrics for Prometheus."""


class StatusApi:
    """Answers requests about this process. Thread-safe."""

    def __init__(self, reporter: Reporter, key: SecretText, address: Address) -> None:
        self._reporter, self._key, self._address = reporter, key, address

    def answer(self, request: HttpRequest) -> HttpResponse:
        if not self._key and not self._address.is_named_by(request.header("Host")):
            return FOREIGN_HOST
        path = request.url.path
        authorized = is_bearer(request.header("Authorization"), self._key)
        if path != "/healthz" and not authorized:
            return KEY_REQUIRED
        match path:
            case "/status":
                return HttpResponse(JSON, json.dumps(self._reporter.status(), separators=(",", ":")).encode())
            case "/healthz":
                return self._health(details=authorized)
            case "/metrics":
                return metrics.respond(self._reporter.metrics, request.header("Accept"))
            case _:
                return HttpResponse(TEXT, b"not found; paths: /status, /healthz, /metrics\n", HTTPStatus.NOT_FOUND)

    def _health(self, *, details: bool) -> HttpResponse:
        if problems := self._reporter.problems():
            text = "\n".join(problems) if details else "unhealthy"
            return HttpResponse(TEXT, f"{text}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        if degraded := self._reporter.degradations():
            return HttpResponse(TEXT, "\n".join(["degraded", *(degraded if details else ()), ""]).encode())
        return HttpResponse(TEXT, b"ok\n")
