"""Paths of the page, their answers, and access to them."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.drill.history import MAX_TREND, WHOLE_BACKUP, PastDrill
from tikv_br.errors import TikvBrError
from tikv_br.redaction import redact
from tikv_br.report import plot
from tikv_br.report.facts import NONE, day, figure, plain, utc
from tikv_br.report.page import render_list
from tikv_br.serve.access import is_local_name
from tikv_br.serve.metrics import collect
from tikv_br.serve.model import Drills, Overview
from tikv_br.serve.tiles import age, make_tiles
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address
from tikv_br.web.metrics import registry, respond
from tikv_br.web.server import HTML, JSON, READS, TEXT, HttpRequest, HttpResponse, is_bearer

PACKAGE = "tikv_br.serve"
PATIENCE = 2.0
"""Seconds that a page waits for sources that were never read."""
RELOAD_SECONDS = 60
MAX_SHOWN, MAX_DRILLS = 100, 10
"""Backups of a storage, and drills of a place, on the page; the JSON has all."""
_DRILL = re.compile(r"/drills/([0-9]{1,4})/([^/]+)", re.ASCII)
METHODS = (*READS, "POST")
"""HTTP methods; POST is the login with a token."""
CSS = "text/css; charset=utf-8"
HEADERS = {
    # No script at all, nothing from other sites, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""Reports come from a storage that others can write to."""
NOT_FOUND = b"not found; paths: /, /api/overview.json, /healthz, /metrics\n"
TOKEN_REQUIRED = b"this path requires the token; pass the header: Authorization: Bearer TOKEN\n"
FOREIGN_HOST = (
    b"the header Host names another machine; open this page as localhost or by its address, or set a token "
    b"(see docs/serve.md)\n"
)


class Site:
    """Answers requests. Thread-safe."""

    def __init__(
        self,
        overview: Callable[[float], Overview],
        report: Callable[[int, str], bytes | None],
        address: Address,
        token: SecretText,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`overview` gets the seconds that it may wait, `report` the number of a place and the id of a drill.

        `clock` returns seconds since the epoch.
        """
        self._overview, self._report, self._token, self._clock = overview, report, token, clock
        # Cookies are not separated by port; a session ends with this process.
        self._cookie, self._session = f"tikv-br-serve-{address.port}", secrets.token_urlsafe(32)
        self._style = render_list(PACKAGE, "serve.css").encode()

    @property
    def methods(self) -> Sequence[str]:
        return METHODS if self._token else READS

    def answer(self, request: HttpRequest) -> HttpResponse:
        answer = self._answer(request)
        return replace(answer, headers=HEADERS | dict(answer.headers))

    def _answer(self, request: HttpRequest) -> HttpResponse:
        if not self._token and not is_local_name(request.header("Host")):
            return HttpResponse(TEXT, FOREIGN_HOST, HTTPStatus.FORBIDDEN)
        url = urlsplit(request.target)
        if request.method == "POST":
            return self._log_in(url.path, request)
        authorized = self._is_authorized(request)
        if url.path == "/serve.css":
            return HttpResponse(CSS, self._style)
        if url.path == "/healthz":
            return self._health(details=authorized)
        return self._private(url.path, url.query, request) if authorized else _ask_for_token(url.path)

    def _private(self, path: str, query: str, request: HttpRequest) -> HttpResponse:
        match path:
            case "/":
                return HttpResponse(HTML, self._page(reload=query != "still"))
            case "/api/overview.json":
                return HttpResponse(JSON, self._json())
            case "/metrics":
                shown = self._overview(PATIENCE)
                return respond(registry(lambda: collect(shown)), request.header("Accept"))
            case "/login":
                return HttpResponse(TEXT, b"", HTTPStatus.SEE_OTHER, {"Location": "./"})
            case _ if found := _DRILL.fullmatch(path):
                return self._drill(int(found[1]), unquote(found[2]))
            case _:
                return HttpResponse(TEXT, NOT_FOUND, HTTPStatus.NOT_FOUND)

    def _drill(self, place: int, drill: str) -> HttpResponse:
        try:
            page = self._report(place, drill)
        except TikvBrError as error:
            text = redact(f"cannot read the report: {error.message}\n{error.hint}\n")
            return HttpResponse(TEXT, text.encode("utf-8", "replace"), HTTPStatus.BAD_GATEWAY)
        if page is None:
            return HttpResponse(TEXT, NOT_FOUND, HTTPStatus.NOT_FOUND)
        return HttpResponse(HTML, page, headers={"Content-Security-Policy": REPORT_POLICY})

    def _is_authorized(self, request: HttpRequest) -> bool:
        if not self._token or is_bearer(request.header("Authorization"), self._token):
            return True
        given = [value for name, _, value in _cookies(request.header("Cookie")) if name == self._cookie]
        return any(hmac.compare_digest(value.encode(), self._session.encode()) for value in given)

    def _log_in(self, path: str, request: HttpRequest) -> HttpResponse:
        if path != "/login":
            return HttpResponse(
                TEXT, b"method not allowed\n", HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(READS)}
            )
        fields = parse_qs(request.body.decode("ascii", "replace"), max_num_fields=8)
        given = fields.get("token", [""])[0].strip()
        if not hmac.compare_digest(given.encode(), self._token.reveal().encode()):
            return _login_form(HTTPStatus.UNAUTHORIZED, wrong=True)
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
        return HttpResponse(TEXT, b"", HTTPStatus.SEE_OTHER, {"Location": "./", "Set-Cookie": cookie})

    def _health(self, *, details: bool) -> HttpResponse:
        """Return 200 while the server answers: problems of sources do not make it unhealthy."""
        findings = [each.text for each in self._overview(0.0).findings]
        lines = ["degraded", *(findings if details else ())] if findings else ["ok"]
        return HttpResponse(TEXT, "".join(f"{line}\n" for line in lines).encode())

    def _json(self) -> bytes:
        found = {"now_ms": round(self._clock() * 1000), **asdict(self._overview(PATIENCE))}
        return json.dumps(found, default=plain, separators=(",", ":")).encode()

    def _page(self, *, reload: bool) -> bytes:
        overview, now_ms = self._overview(PATIENCE), round(self._clock() * 1000)
        return render_list(
            PACKAGE,
            "overview.html",
            overview=overview,
            now_ms=now_ms,
            age=lambda milliseconds: age((now_ms - milliseconds) / 1000),
            seconds=age,
            physical_ms=physical_ms,
            moment=moment,
            sections=[(anchor, title) for anchor, title, shown in overview.sections if shown],
            tiles=make_tiles(overview, now_ms),
            archives=[each for each in overview.archives if each.status],
            syncs=[each for page in overview.status_pages for each in page.syncs],
            trends=[_trends(each) for each in overview.drills],
            reload=RELOAD_SECONDS if reload else 0,
            most=MAX_SHOWN,
            most_drills=MAX_DRILLS,
        ).encode("utf-8", "replace")


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tikv-br"'}


def _ask_for_token(path: str) -> HttpResponse:
    if path in {"/", "/login"}:
        return _login_form(HTTPStatus.UNAUTHORIZED)
    return HttpResponse(TEXT, TOKEN_REQUIRED, HTTPStatus.UNAUTHORIZED, _CHALLENGE)


def _login_form(code: HTTPStatus, *, wrong: bool = False) -> HttpResponse:
    return HttpResponse(HTML, render_list(PACKAGE, "login.html", wrong=wrong).encode(), code, _CHALLENGE)


def _cookies(header: str) -> list[tuple[str, str, str]]:
    parts = [each.strip().partition("=") for each in header.split(";")]
    return [(name, separator, value) for name, separator, value in parts]


def moment(milliseconds: int) -> str:
    """A time of UTC, to the second; a dash for none, and for one that no clock shows."""
    try:
        return utc(milliseconds).removesuffix(" UTC")
    except (ValueError, OverflowError, OSError):
        return NONE


def _trends(drills: Drills) -> list[tuple[str, str, plot.Curve, list[str], list[str]]]:
    """Name, last value, curve, texts below it and a text for each point, of RTO and RPO of drills that recover everything."""
    past = [each for each in reversed(drills.drills) if each.scenario == WHOLE_BACKUP][-MAX_TREND:]
    figures: tuple[tuple[str, Callable[[PastDrill], float | None]], ...] = (
        ("RTO", lambda each: each.rto),
        ("RPO", lambda each: each.rpo),
    )
    found = []
    places = [float(place) for place in range(len(past))]
    for name, value_of in figures:
        values = [value_of(each) for each in past]
        known = [(each, value) for each, value in zip(past, values, strict=True) if value is not None]
        if len(known) < 2:
            continue
        curve = plot.curve(places, values, unit="s", marks=places[:: len(places) - 1])
        marks = [day(past[int(mark.value)].started_ms) for mark in curve.marks]
        tips = [f"{day(each.started_ms)}, {each.verdict}: {figure(value, 's')}" for each, value in known]
        found.append((name, figure(known[-1][1], "s"), curve, marks, tips))
    return found
