"""What each path answers, and to whom."""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.drill.history import MAX_TREND, WHOLE_BACKUP, PastDrill
from tikv_br.incremental.watch.address import Address
from tikv_br.incremental.watch.web import HTML, JSON, READS, TEXT, HttpRequest, HttpResponse, is_bearer
from tikv_br.report import plot
from tikv_br.report.facts import NONE, Verdict, day, figure, plain, utc
from tikv_br.report.page import render_list
from tikv_br.serve.access import is_local_name
from tikv_br.serve.overview import Drills, Overview
from tikv_br.storage.crypter import SecretText

PACKAGE = "tikv_br.serve"
PATIENCE = 2.0
"""Seconds that a page waits for sources that were never read."""
RELOAD_SECONDS = 60
MAX_SHOWN, MAX_DRILLS = 100, 10
"""Backups of a storage, and drills of a place, on the page; the JSON has all."""
VERDICTS = frozenset(map(str, Verdict))
METHODS = (*READS, "POST")
"""With a token: the login is a POST."""
CSS = "text/css; charset=utf-8"
HEADERS = {
    # No script at all, nothing from other sites, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_FOUND = b"not found; paths: /, /api/overview.json, /healthz\n"
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
        address: Address,
        token: SecretText,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`overview` gets the seconds that it may wait; `clock` returns seconds since the epoch."""
        self._overview, self._token, self._clock = overview, token, clock
        # Cookies are not separated by port; a session ends with this process.
        self._cookie, self._session = f"tikv-br-serve-{address.port}", secrets.token_urlsafe(32)
        self._style = render_list(PACKAGE, "serve.css").encode()

    @property
    def methods(self) -> Sequence[str]:
        """The methods that are served."""
        return METHODS if self._token else READS

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        if not self._token and not is_local_name(request.header("Host")):
            return _reply(TEXT, FOREIGN_HOST, HTTPStatus.FORBIDDEN)
        url = urlsplit(request.target)
        if request.method == "POST":
            return self._log_in(url.path, request)
        authorized = self._is_authorized(request)
        if url.path == "/serve.css":
            return _reply(CSS, self._style)
        if url.path == "/healthz":
            return self._health(details=authorized)
        return self._private(url.path, url.query) if authorized else _ask_for_token(url.path)

    def _private(self, path: str, query: str) -> HttpResponse:
        match path:
            case "/":
                return _reply(HTML, self._page(reload=query == "reload"))
            case "/api/overview.json":
                return _reply(JSON, self._json())
            case "/login":
                return _reply(TEXT, b"", HTTPStatus.SEE_OTHER, {"Location": "./"})
            case _:
                return _reply(TEXT, NOT_FOUND, HTTPStatus.NOT_FOUND)

    def _is_authorized(self, request: HttpRequest) -> bool:
        if not self._token or is_bearer(request.header("Authorization"), self._token):
            return True
        given = [value for name, _, value in _cookies(request.header("Cookie")) if name == self._cookie]
        return any(hmac.compare_digest(value.encode(), self._session.encode()) for value in given)

    def _log_in(self, path: str, request: HttpRequest) -> HttpResponse:
        """Exchange the token for a cookie."""
        if path != "/login":
            return _reply(TEXT, b"method not allowed\n", HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(READS)})
        fields = parse_qs(request.body.decode("ascii", "replace"), max_num_fields=8)
        given = fields.get("token", [""])[0].strip()
        if not hmac.compare_digest(given.encode(), self._token.reveal().encode()):
            return _login_form(HTTPStatus.UNAUTHORIZED, wrong=True)
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
        return _reply(TEXT, b"", HTTPStatus.SEE_OTHER, {"Location": "./", "Set-Cookie": cookie})

    def _health(self, *, details: bool) -> HttpResponse:
        """200 as long as it answers: what it shows of others does not make it unhealthy."""
        findings = [each.text for each in self._overview(0.0).findings]
        lines = ["degraded", *(findings if details else ())] if findings else ["ok"]
        return _reply(TEXT, "".join(f"{line}\n" for line in lines).encode())

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
            sections=_sections(overview),
            tiles=_tiles(overview, now_ms),
            archives=[each for each in overview.archives if each.status],
            syncs=[each for page in overview.status_pages for each in page.syncs],
            trends=[_trends(each) for each in overview.drills],
            reload=RELOAD_SECONDS if reload else 0,
            reload_seconds=RELOAD_SECONDS,
            most=MAX_SHOWN,
            most_drills=MAX_DRILLS,
        ).encode("utf-8", "replace")


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tikv-br"'}


def _reply(
    kind: str, body: bytes, code: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> HttpResponse:
    return HttpResponse(kind, body, code, HEADERS | (headers or {}))


def _ask_for_token(path: str) -> HttpResponse:
    if path in {"/", "/login"}:
        return _login_form(HTTPStatus.UNAUTHORIZED)
    return _reply(TEXT, TOKEN_REQUIRED, HTTPStatus.UNAUTHORIZED, _CHALLENGE)


def _login_form(code: HTTPStatus, *, wrong: bool = False) -> HttpResponse:
    return _reply(HTML, render_list(PACKAGE, "login.html", wrong=wrong).encode(), code, _CHALLENGE)


def _cookies(header: str) -> list[tuple[str, str, str]]:
    """Name, ``=`` and value of each cookie."""
    parts = [each.strip().partition("=") for each in header.split(";")]
    return [(name, separator, value) for name, separator, value in parts]


def age(seconds: float) -> str:
    """A duration, as exact as its size is worth: ``8 s``, ``12 min``, ``5 h 03 min``, ``3 d 4 h``."""
    if seconds < 0:
        return f"-{age(-seconds)}"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h" if days < 10 else f"{days} d"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def moment(milliseconds: int) -> str:
    """A time of UTC, to the second; a dash for none, and for one that no clock shows."""
    try:
        return utc(milliseconds).removesuffix(" UTC")
    except (ValueError, OverflowError, OSError):
        return NONE


def _sections(overview: Overview) -> list[tuple[str, str]]:
    """Anchor and title of what there are sources of."""
    groups: tuple[tuple[str, str, Sequence[object]], ...] = (
        ("backups", "Backups", overview.storages),
        ("logs", "Log archives", overview.archives),
        ("syncs", "Syncs", overview.status_pages),
        ("drills", "Drills", overview.drills),
        ("gc", "Garbage collection", overview.gc),
    )
    return [(anchor, title) for anchor, title, group in groups if group]


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the summary."""

    name: str
    value: str
    more: str
    verdict: str = ""
    """A class of the style sheet."""


def _tiles(overview: Overview, now_ms: int) -> list[Tile]:
    """The most important figure of each section; none of a section that was not read."""
    found = []
    backups = [each for each in overview.backups if not each.removing]
    if backups:
        newest = max(backups, key=lambda each: each.finished_ms)
        found.append(Tile("newest backup", f"{age((now_ms - newest.finished_ms) / 1000)} ago", newest.path))
    ends = [(window.to_ms, window.log_id) for each in backups for window in each.windows if not window.problem]
    if ends:
        last, log = max(ends)
        found.append(Tile("restorable up to", f"{age((now_ms - last) / 1000)} ago", f"with the log {log}"))
    logs = [each.status for each in overview.archives if each.status]
    if logs:
        slowest = max(logs, key=lambda each: each.rpo_seconds)
        found.append(Tile("greatest lag of a log", age(slowest.rpo_seconds), slowest.log_id))
    lags = [
        (each.checkpoint_lag, each.name)
        for page in overview.status_pages
        for each in page.syncs
        if each.checkpoint_lag is not None
    ]
    if lags:
        lag, name = max(lags)
        found.append(Tile("greatest lag of a sync", figure(lag, "s"), name))
    for last_drill in (each.drills[0] for each in overview.drills if each.drills):
        verdict = last_drill.verdict if last_drill.verdict in VERDICTS else "bad"
        since = f"{age((now_ms - last_drill.started_ms) / 1000)} ago"
        found.append(Tile("last drill", last_drill.verdict, since, verdict))
    found += [
        Tile("GC safe point", f"{age(gc.lag)} old", gc.holder or "not held back")
        for gc in overview.gc
        if gc.lag is not None
    ]
    return found


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
