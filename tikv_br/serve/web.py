"""Paths of the page and their answers: the page, the figures at its top, and the Prometheus metrics, which docs/serve.md lists."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from urllib.parse import parse_qs, unquote

from prometheus_client.core import GaugeMetricFamily, Metric

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.drill.history import MAX_TREND, WHOLE_BACKUP, PastDrill
from tikv_br.errors import TikvBrError
from tikv_br.redaction import redact
from tikv_br.report import plot
from tikv_br.report.facts import NONE, DrillVerdict, day, figure, plain, utc
from tikv_br.report.page import render_list
from tikv_br.serve.access import is_local_name
from tikv_br.serve.findings import GC_LIMIT
from tikv_br.serve.model import Drills, Gc, Newest, Overview
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address
from tikv_br.web.metrics import registry, respond
from tikv_br.web.server import HTML, JSON, READS, TEXT, HttpRequest, HttpResponse, is_bearer


def collect(shown: Overview) -> Iterator[Metric]:
    labels = ["storage", "prefix"]
    newest = [each for storage in shown.storages for each in storage.newest]
    finished = GaugeMetricFamily(
        "tikv_br_backup_newest_timestamp_seconds", "When the newest backup ended; 0 = there is none.", labels=labels
    )
    limit = GaugeMetricFamily(
        "tikv_br_backup_max_age_seconds", "How old the newest backup may be, as --max-backup-age.", labels=labels
    )
    rows = GaugeMetricFamily(
        "tikv_br_backup_newest_rows", "Rows of the newest full backup.", labels=[*labels, "keyspaces"]
    )
    shrunk = GaugeMetricFamily(
        "tikv_br_backup_newest_shrunk",
        "1 if the newest full backup has less than half of the rows of the one before it.",
        labels=labels,
    )
    for each in newest:
        rows.add_metric([each.storage, each.prefix, each.keyspaces], each.total_kvs)
        shrunk.add_metric([each.storage, each.prefix], bool(each.rows_before))
        finished.add_metric([each.storage, each.prefix], each.finished_ms / 1000)
        if each.max_age:
            limit.add_metric([each.storage, each.prefix], each.max_age)
    yield finished
    yield limit
    yield rows
    yield shrunk
    findings = GaugeMetricFamily(
        "tikv_br_serve_findings", "Things that need attention, by section of the page.", labels=["section"]
    )
    counts = Counter(each.section for each in shown.findings)
    for section, _, _ in shown.sections:
        findings.add_metric([section], counts[section])
    yield findings


BAD = "bad"
VERDICTS = frozenset(map(str, DrillVerdict))


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


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the summary."""

    name: str
    value: str
    more: str
    verdict: str = ""
    """A class of the style sheet."""


def make_tiles(shown: Overview, now_ms: int) -> list[Tile]:
    """The most important figures of each section; none of a section that was not read."""
    newest = [each for storage in shown.storages for each in storage.newest]
    ends = [(window.to_ms, window.log_id) for each in shown.backups for window in each.windows if not window.problem]
    found = [_newest(each, now_ms, named=len(newest) > 1) for each in newest]
    if ends:
        last, log = max(ends)
        found.append(Tile("restorable up to", f"{age((now_ms - last) / 1000)} ago", f"with the log {log}"))
    found += [
        *_logs(shown),
        *_syncs(shown),
        *_drills(shown, now_ms),
        *(_gc(each) for each in shown.gc if each.source.read_ms),
    ]
    return found


def _newest(newest: Newest, now_ms: int, *, named: bool) -> Tile:
    where = newest.prefix or newest.storage.partition("?")[0]
    name = f"newest backup in {where}" if named else "newest backup"
    value = f"{age((now_ms - newest.finished_ms) / 1000)} ago" if newest.path else "none"
    more = f"{newest.path}; allowed: {age(newest.max_age)}" if newest.too_old else newest.path
    return Tile(name, value, more, BAD if newest.too_old else "")


def _logs(shown: Overview) -> Iterator[Tile]:
    lags = [(each.status.rpo_seconds, each.status.log_id) for each in shown.archives if each.status]
    if lags:
        lag, name = max(lags)
        is_bad = any(each.section == "logs" for each in shown.findings)
        yield Tile("greatest lag of a log", age(lag), name, BAD if is_bad else "")


def _syncs(shown: Overview) -> Iterator[Tile]:
    """A sync whose process does not answer has no lag: what was last read of it is no longer true."""
    silent = [page.source.place for page in shown.status_pages if page.source.error]
    running = [each for page in shown.status_pages if not page.source.error for each in page.syncs]
    bad = [*silent, *(each.name for each in running if each.trouble)]
    lags = [(each.checkpoint_lag, each.name) for each in running if each.checkpoint_lag is not None]
    if bad:
        yield Tile("syncs in trouble", f"{len(bad)} of {len(silent) + len(running)}", ", ".join(bad[:3]), BAD)
    if lags:
        lag, name = max(lags)
        yield Tile("greatest lag of a sync", figure(lag, "s"), name, BAD if name in bad else "")


def _drills(shown: Overview, now_ms: int) -> Iterator[Tile]:
    for last in (each.drills[0] for each in shown.drills if each.drills):
        verdict = last.verdict if last.verdict in VERDICTS else BAD
        yield Tile("last drill", last.verdict, f"{age((now_ms - last.started_ms) / 1000)} ago", verdict)


def _gc(gc: Gc) -> Tile:
    if gc.never_ran or gc.lag is None:
        return Tile("GC safe point", "never ran", gc.source.place, BAD)
    is_bad = gc.lag > GC_LIMIT
    return Tile("GC safe point", f"{age(gc.lag)} old", gc.holder or "not held back", BAD if is_bad else "")


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
        url = request.url
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
