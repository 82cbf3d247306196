"""Answers to requests, and access to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serve.samples import HOUR_MS, NOW_MS, backups, entry, gc_report, healthy, overview, troubled
from tikv_br.errors import StorageUnreachable, UsageError
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.serve.access import check_access, is_local_name, parse_status_url
from tikv_br.serve.findings import AgeLimit, OverviewLimits
from tikv_br.serve.model import Overview, ReadState, States
from tikv_br.serve.web import MAX_SHOWN, Site, age
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address
from tikv_br.web.server import HttpRequest, HttpResponse

TOKEN = SecretText("a-token-of-the-test")
LOOPBACK = Address("127.0.0.1", 8390)


def report(place: int, drill: str) -> bytes | None:
    """The page of a drill."""
    if drill == "gone":
        raise StorageUnreachable("s3://x does not answer: secret_access_key=abc", hint="Check the network.")
    return b"<style></style>" if (place, drill) == (0, "20260921T000000-abcdef") else None


def site(found: Overview | None = None, token: SecretText | None = None) -> Site:
    """A site of an overview."""
    shown = overview() if found is None else found
    return Site(lambda _patience: shown, report, LOOPBACK, token or SecretText(), clock=lambda: NOW_MS / 1000)


def ask(
    of: Site, target: str = "/", method: str = "GET", body: bytes = b"", host: str = "localhost:8390", **headers: str
) -> HttpResponse:
    """The answer to a request."""
    return of.answer(
        HttpRequest(method, target, {"host": host} | {name.lower(): value for name, value in headers.items()}, body)
    )


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        """Note it."""
        self.texts.append(data.strip())


def test_the_page_has_what_the_overview_has() -> None:
    """Names, times, sizes, chains and windows, in a page with landmarks, headings and captions."""
    page = Elements(ask(site()).body)
    text = " ".join(page.texts)
    for said in (
        "Nothing needs attention",
        "2026-09-21-12",
        "2 h 12 min ago",
        "a48bc6f6aac629ad · increment · store",
        "aes256-ctr",
        "pinned",
        "16.0 GiB",
        "with log default",
        "its backup-ts",
        "91,204,551",
        "✓ runs",
        "6 min 20 s",
        "tikv-br-sync-east has held GC back for 1 h 56 min",
    ):
        assert said in text, said
    assert {"header", "nav", "main", "footer", "h1", "h2", "h3", "table", "svg"} <= set(page.tags)
    anchors = {value.removeprefix("#") for name, value in page.attributes if name == "href" and value.startswith("#")}
    assert anchors <= {value for name, value in page.attributes if name == "id"}
    assert page.tags.count("table") == len([each for each in page.attributes if each == ("role", "table")]) == 5


def test_transactional_backups_are_marked() -> None:
    """The page shows the key mode beside the API version; for raw backups the version alone."""
    found = replace(healthy(), backups=(backups(entry("raw", 2.0), entry("txn", 1.0, key_mode=KeyMode.TXN)),))
    texts = Elements(ask(site(overview(found))).body).texts
    assert (texts.count("v2"), texts.count("v2 txn")) == (1, 1)
    shown = json.loads(ask(site(overview(found)), "/api/overview.json").body)
    assert {each["path"]: each["key_mode"] for each in shown["storages"][0]["backups"]} == {"raw": "raw", "txn": "txn"}


def test_hostile_names_stay_text() -> None:
    """Names in backups, logs, status pages, reports and PD are shown as they are and never become markup or attributes."""
    page = Elements(ask(site(overview(troubled()))).body)
    assert not {"script", "img", "b", "iframe"} & set(page.tags)
    evil = "<script>alert(1)</script>\"'&\\u202e"  # the character that reverses text is shown as an escape
    text = " ".join(page.texts)
    assert text.count(evil) >= 6
    assert "\u202e" not in text
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    addresses = {value for name, value in page.attributes if name in {"href", "src", "action"}}
    page_of_ours = r"#[a-z]+|\./(\?still)?|serve\.css|data:,|api/overview\.json|drills/0/[0-9A-Za-z%._-]+"
    assert all(re.fullmatch(page_of_ours, each) for each in addresses)


def test_an_empty_overview_is_a_page() -> None:
    """Before anything was read, and without sources."""
    assert b"Nothing needs attention" in ask(site(overview(States()))).body
    unread = States(**{name: (type(group[0])("place"),) for name, group in vars_of(healthy()).items()})
    assert ask(site(overview(unread))).body.count("Being read …".encode()) == 5


def vars_of(states: States) -> dict[str, tuple]:  # type: ignore[type-arg]
    """The groups of states by name."""
    return {name: getattr(states, name) for name in States.__dataclass_fields__}


def test_a_long_list_is_cut() -> None:
    """The page shows the newest; the JSON has all."""
    of = site(
        overview(States(backups=(backups(*(entry(f"b{number}", 1.0 + number) for number in range(MAX_SHOWN + 7))),)))
    )
    page = Elements(ask(of).body)
    assert "7 more backups in" in " ".join(page.texts)
    assert "b0" in page.texts
    assert f"b{MAX_SHOWN}" not in page.texts
    assert len(json.loads(ask(of, "/api/overview.json").body)["storages"][0]["backups"]) == MAX_SHOWN + 7


def test_times_that_no_clock_shows() -> None:
    """An entry may have any time: it is a dash."""
    assert (
        ask(site(overview(States(backups=(backups(entry("b", -(10**12))),))))).body.count("\N{EN DASH}".encode()) >= 1
    )


def test_the_json_has_the_same() -> None:
    """64-bit integers are exact."""
    answer = ask(site(), "/api/overview.json")
    found = json.loads(answer.body)
    assert answer.content_type == "application/json"
    assert found["now_ms"] == NOW_MS
    made = overview()
    assert found["storages"][0]["backups"][0]["windows"][0]["to_ts"] == made.backups[0].windows[0].to_ts > 2**53
    assert found["storages"][0]["backups"][-1]["api_version"] == "v1"
    assert found["archives"][0]["status"]["state"] == "active"
    assert [each["name"] for each in found["status_pages"][0]["syncs"]] == ["east", "west"]
    assert found["gc"][0]["holder"] == "tikv-br-sync-east"


def test_the_page_reloads_itself() -> None:
    """Unless the reader has stopped it."""
    assert b'<meta http-equiv="refresh" content="60">' in ask(site()).body
    assert b'http-equiv="refresh"' not in ask(site(), "/?still").body


def test_drills_link_to_their_reports() -> None:
    """Each row; the page is shown without scripts, whatever a writer of the storage has put into it."""
    links = [value for name, value in Elements(ask(site()).body).attributes if value.startswith("drills/")]
    assert links[0] == "drills/0/20260921T000000-abcdef"
    found = ask(site(), f"/{links[0]}")
    assert (found.code, found.body) == (200, b"<style></style>")
    policy = found.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("; sandbox")
    assert "script-src" not in policy
    for target in ("/drills/1/20260921T000000-abcdef", "/drills/0/..%2F..%2Fsecret", "/drills/0/", "/drills/x/y"):
        assert ask(site(), target).code == 404
    gone = ask(site(), "/drills/0/gone")
    assert (gone.code, b"abc" in gone.body, b"Check the network." in gone.body) == (502, False, True)
    assert ask(site(token=TOKEN), f"/{links[0]}").code == 401


def test_a_sync_that_does_not_answer_is_not_green() -> None:
    """The page reports that it does not answer, whatever its last figures, and the tile is red."""
    good = healthy()
    silent = replace(good, syncs=(replace(good.syncs[0], error="refused", hint="Start it."),))
    page = ask(site(overview(silent))).body.decode()
    assert "✓ runs" not in page
    assert page.count("✗ does not answer") == 2
    assert '<dt>syncs in trouble</dt><dd class="bad">1 of 1<small>http://10.0.0.5:8300' in page
    assert "greatest lag of a sync" not in page
    assert '<dd class="bad">' not in ask(site()).body.decode()


def test_source_and_target_of_a_sync_are_named() -> None:
    """From which cluster to which sink."""
    text = " ".join(Elements(ask(site()).body).texts)
    assert re.search(r"10\.0\.0\.1:2379 +→ +tikv://10\.2\.0\.1:2379\?keyspace=7", text)


def test_tiles_of_what_needs_attention_are_red() -> None:
    """The newest backup, and GC that never ran."""
    never = ReadState("10.0.0.1:2379", replace(gc_report(), safe_point=0), NOW_MS)
    page = ask(site(overview(States(backups=(backups(entry("a", 31.0)),), gc=(never,))))).body.decode()
    assert '<dd class="bad">1 d 7 h ago<small>a; allowed: 1 d 6 h</small>' in page
    assert '<dd class="bad">never ran<small>10.0.0.1:2379</small>' in page


def test_metrics() -> None:
    """The newest backup of each limit, the limit, and the number of findings by section."""
    ages = (AgeLimit(3600.0, "2026"), AgeLimit(0.0, "none/"))
    text = ask(site(overview(limits=OverviewLimits(ages=ages))), "/metrics").body.decode()
    found = {
        (each.name, *sorted(each.labels.values(), reverse=True)): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    place = "s3://backups/full?endpoint=https://s3.example.com&region=eu-1"
    assert found["tikv_br_backup_newest_timestamp_seconds", place, "2026"] == (NOW_MS - 2.2 * HOUR_MS) / 1000
    assert found["tikv_br_backup_newest_timestamp_seconds", place, "none/"] == 0
    assert {key: value for key, value in found.items() if key[0] == "tikv_br_backup_max_age_seconds"} == {
        ("tikv_br_backup_max_age_seconds", place, "2026"): 3600
    }
    sections = ("backups", "logs", "syncs", "drills", "gc")
    assert [found["tikv_br_serve_findings", each] for each in sections] == [1, 0, 0, 0, 0]
    assert ask(site(token=TOKEN), "/metrics").code == 401
    assert ask(site(), "/metrics", accept="application/openmetrics-text; version=x").code == 400


@pytest.mark.parametrize("target", ["/", "/api/overview.json", "/healthz", "/serve.css", "/nowhere", "/login"])
@pytest.mark.parametrize("token", [SecretText(), TOKEN])
def test_every_answer_forbids_scripts_and_frames(target: str, token: SecretText) -> None:
    """The policy allows the own style sheet, a form to itself and nothing else."""
    policy = ask(site(token=token), target).headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; ")
    assert "script-src" not in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy


def test_paths() -> None:
    """Others do not exist."""
    of = site()
    assert [ask(of, target).code for target in ("/", "/healthz", "/nowhere", "/../web.py", "/index.html", "//[")] == [
        *(200, 200),
        *(404, 404, 404, 404),
    ]


def test_health() -> None:
    """200 whatever the state of sources; findings are shown to authorized readers only."""
    assert ask(site(), "/healthz").body == b"ok\n"
    open_site, closed = site(overview(troubled())), site(overview(troubled()), TOKEN)
    assert ask(open_site, "/healthz").body.startswith(b"degraded\ncannot read s3://other/full")
    assert (ask(closed, "/healthz").code, ask(closed, "/healthz").body) == (200, b"degraded\n")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(
            (name, True)
            for name in ("localhost", "LOCALHOST:8390", "127.0.0.1", "127.0.0.1:1", "127.8.8.8", "[::1]:8390")
        ),
        *(
            (name, False)
            for name in ("", "evil.example", "localhost.evil.example", "evil.example:8390", "10.0.0.1:8390")
        ),
        *((name, False) for name in ("evil@127.0.0.1", "127.0.0.1/evil", "[::1", "127.0.0.1 evil", "0x7f.1")),
    ],
)
def test_a_name_that_was_rebound_gets_nothing(host: str, local: bool) -> None:
    """Without a token only requests to a name of this machine are answered; with one the token decides."""
    assert is_local_name(host) is local
    for target in ("/", "/api/overview.json", "/healthz"):
        assert ask(site(), target, host=host).code == (200 if local else 403)
    assert ask(site(token=TOKEN), host=host, authorization=f"Bearer {TOKEN.reveal()}").code == 200


def test_without_the_token_nothing_is_shown() -> None:
    """A form at the page's address, 401 elsewhere, and no value in either."""
    of = site(token=TOKEN)
    for target in ("/", "/login", "/api/overview.json", "/nowhere"):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Basic {TOKEN.reveal()}"},
            {"cookie": "a=b"},
        ):
            answer = ask(of, target, "GET", b"", "localhost:8390", **headers)
            assert answer.code == 401
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="tikv-br"'
            assert not re.search(b"2026|backups|a-token", answer.body)
    assert b'action="login"' in ask(of).body
    assert ask(of, "/serve.css").code == 200


def log_in(of: Site, token: str) -> HttpResponse:
    """Send the form."""
    return ask(of, "/login", "POST", urlencode({"token": token}).encode())


def test_login() -> None:
    """The token is exchanged for a cookie that scripts and other sites cannot use, and that does not contain it."""
    of = site(token=TOKEN)
    done = log_in(of, f" {TOKEN.reveal()}\n")
    assert (done.code, done.headers["Location"]) == (303, "./")
    cookie, *attributes = done.headers["Set-Cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert TOKEN.reveal() not in done.headers["Set-Cookie"]
    assert ask(of, cookie=f"other=1; {cookie}").code == 200
    assert ask(of, "/api/overview.json", cookie=cookie).code == 200
    assert ask(of, "/login", cookie=cookie).code == 303
    assert ask(site(token=TOKEN), cookie=cookie).code == 401  # another process
    assert ask(of, cookie=cookie[:-1]).code == 401
    assert ask(of, cookie=f"{cookie.split('=')[0]}=").code == 401


@pytest.mark.parametrize("given", ["", "wrong", TOKEN.reveal()[:-1], TOKEN.reveal() + "x", "ü"])
def test_a_wrong_token(given: str) -> None:
    """The form again, with the reason."""
    answer = log_in(site(token=TOKEN), given)
    assert (answer.code, "Set-Cookie" in answer.headers) == (401, False)
    assert b"This is not the token." in answer.body


def test_only_the_login_is_posted() -> None:
    """Without a token no POST is served at all; with one, only that of the form."""
    assert site().methods == ("GET", "HEAD")
    assert site(token=TOKEN).methods == ("GET", "HEAD", "POST")
    answer = ask(site(token=TOKEN), "/", "POST", authorization=f"Bearer {TOKEN.reveal()}")
    assert (answer.code, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "db-1.example", "localhost.example"])
def test_other_machines_need_the_token(host: str) -> None:
    """An address that they can reach is refused without one."""
    with pytest.raises(UsageError, match="no token is set"):
        check_access(Address(host, 8390), SecretText())
    check_access(Address(host, 8390), TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    """Only this machine reaches it."""
    check_access(Address(host, 8390), SecretText())


@pytest.mark.parametrize("text", ["short", "x" * 15, "with spaces in it 123", "ümlaut-ümlaut-ümlaut"])
def test_weak_tokens_are_refused(text: str) -> None:
    """The message does not repeat it."""
    with pytest.raises(UsageError, match="at least 16") as refused:
        check_access(LOOPBACK, SecretText(text))
    assert text not in refused.value.message


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("10.0.0.5:8300", "http://10.0.0.5:8300"),
        ("http://10.0.0.5:8300/", "http://10.0.0.5:8300"),
        ("https://sync.example/status-page/", "https://sync.example/status-page"),
        ("[::1]:8300", "http://[::1]:8300"),
    ],
)
def test_addresses_of_status_pages(given: str, url: str) -> None:
    """A path is kept, for pages behind a proxy."""
    assert parse_status_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            "http://",
            "ftp://x",
            "file:///etc/passwd",
            "http://x:99999",
            "http://[::1",
            "http://x y",
            "http://x\r\ny",
        ),
        *("http://u:p@x", "http://x/?key=1", "http://x/#key"),
    ],
)
def test_other_addresses_are_refused(given: str) -> None:
    """Also those with a key or a password in them, which are not repeated."""
    with pytest.raises(UsageError, match="--status") as refused:
        parse_status_url(given)
    assert "u:p" not in refused.value.message


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0, "0 s"), (59.4, "59 s"), (60.0, "1 min"), (3599.0, "59 min"), (3660.0, "1 h 01 min")),
        *((86_399.0, "23 h 59 min"), (90_000.0, "1 d 1 h"), (864_000.0, "10 d"), (-120.0, "-2 min")),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    """As exact as their size is worth."""
    assert age(seconds) == text
