"""Reading status pages, reports of drills, and all sources beside each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.waiting import eventually
from tests.unit.drill.samples import passed
from tests.unit.incremental.statuses import WHOLE, status
from tests.unit.serve.samples import backups, drill, entry, log
from tikv_br import cancellation
from tikv_br.backupset.index import Index
from tikv_br.drill.history import past_drill_of, sealed
from tikv_br.drill.objectives import Measured, Objectives, judge
from tikv_br.errors import StorageUnreachable, TikvBrError
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.incremental.watch.server import serve
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.serve.findings import OverviewLimits
from tikv_br.serve.sources import BackupsSource, DrillSource, StatusSource, Sync
from tikv_br.serve.watcher import Sources, Watcher
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.web.address import Address
from tikv_br.web.server import HttpRequest, HttpResponse, listening

LOOPBACK = Address("127.0.0.1", 0)
KEY = SecretText("a-key-of-the-test")
NO_LIMITS = OverviewLimits(ages=())


def test_the_status_of_syncs() -> None:
    """Contents of a process's status page, read with its key; without it the error names the option."""
    ends = {"source": "10.0.0.1:2379", "sink": "tikv://10.2.0.1:2379"}
    found = [NamedStatus("a", status(feed=WHOLE), **ends), NamedStatus("b", None, error="password=hunter2 is wrong")]
    with serve(LOOPBACK, lambda: found, key=KEY) as address:
        assert StatusSource(f"http://{address}", KEY).read() == (
            Sync("a", "", "", 3.0, 0.7, 2000.0, 3000, **ends),
            Sync("b", "password=*** is wrong", "", None, None, 0.0, 0),
        )
        for key in (SecretText(), SecretText("another")):
            with pytest.raises(TikvBrError, match="requires its status key") as refused:
                StatusSource(f"http://{address}", key).read()
            assert "--status-key-file" in refused.value.hint


@contextmanager
def answering(answer: Callable[[HttpRequest], HttpResponse]) -> Iterator[str]:
    """A server that answers so; yields its URL."""
    with listening(LOOPBACK, answer) as address:
        yield f"http://{address}"


GOOD = {"checkpoint_lag": 1.0, "write_lag": None, "events_per_second": 1, "written": 1}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b"[]", b"{}", b'{"syncs": 7}', b'{"syncs": [7]}', b'{"syncs": ["status"]}', b"[" * 100_000),
        json.dumps({"syncs": [{"name": "a", "trouble": "", "status": {}}]}).encode(),
        *(
            json.dumps({"syncs": [{"name": "a", "trouble": "", "status": GOOD | {"checkpoint_lag": value}}]}).encode()
            for value in (float("nan"), float("inf"), "1", None, True, 10**400)
        ),
        json.dumps({"syncs": [{"name": "a", "trouble": "", "status": GOOD | {"written": float("inf")}}]}).encode(),
        b" " * (5 << 20),
    ],
    ids=range(17),
)
def test_other_answers_are_refused(body: bytes) -> None:
    """Nothing that is no status gets on to the page, however large or deep."""
    with (
        answering(lambda _: HttpResponse("application/json", body)) as url,
        pytest.raises(TikvBrError, match=r"is not the status of syncs|is larger than"),
    ):
        StatusSource(url, KEY).read()


def test_no_other_address_gets_the_key() -> None:
    """A redirect is an error."""
    asked: list[HttpRequest] = []

    def note(request: HttpRequest) -> HttpResponse:
        asked.append(request)
        return HttpResponse("text/plain", b"")

    with answering(note) as other:
        moved = HttpResponse("text/plain", b"", HTTPStatus.FOUND, {"Location": f"{other}/status"})
        with answering(lambda _: moved) as url, pytest.raises(TikvBrError, match="HTTP 302"):
            StatusSource(url, KEY).read()
    assert asked == []


def test_nobody_there() -> None:
    """The reason is the system's; the hint covers a stopped sync."""
    with pytest.raises(TikvBrError, match="refused") as caught:
        StatusSource("http://127.0.0.1:1", KEY).read()
    assert "run its command again" in caught.value.hint
    assert "--gc-ttl" in caught.value.hint


def test_reports_of_drills(tmp_path: Path) -> None:
    """Those that drills wrote; one whose figures are none is left out, though its seal is whole."""
    home = open_store(parse(str(tmp_path)))

    def write(report: dict[str, Any]) -> None:
        home.put(f"reports/{report['id']}.json", (json.dumps(sealed(report), indent=1) + "\n").encode())

    report = passed(2).to_json()
    write(report)
    write(passed(3).to_json())
    wrong = [("started_ms", "<b>"), ("started_ms", 10**18), ("rto", float("nan")), ("seconds", None), ("scenario", [1])]
    for number, (name, value) in enumerate(wrong):
        trend = [report["trend"][-1] | {"id": f"2027-{number}", name: value}]
        write(report | {"id": f"2027-{number}", "trend": trend})
    source = DrillSource(parse(str(tmp_path)))
    assert [each.id for each in source.read()] == [passed(2).id, passed(3).id]
    home.put(f"reports/{passed(2).id}.html", b"the page")
    assert source.report(passed(2).id) == b"the page"


def test_keys_of_the_backup_and_keys_restored(tmp_path: Path) -> None:
    """Both are distinguished; a report of an earlier version lacks the latter."""
    home = open_store(parse(str(tmp_path)))
    report = replace(passed(), goals=judge(Objectives(), Measured(keys=990)))
    new = report.to_json() | {"trend": [asdict(past_drill_of(report.to_json()))]}
    (old,) = passed(2).to_json()["trend"][-1:]
    old = {name: value for name, value in old.items() if name != "restored_keys"}
    for each in (new, passed(2).to_json() | {"trend": [old]}):
        home.put(f"reports/{each['id']}.json", (json.dumps(sealed(each), indent=1) + "\n").encode())
    found = DrillSource(parse(str(tmp_path))).read()
    assert [(each.keys, each.restored_keys) for each in found] == [(1000, 990), (1000, None)]


def test_an_index_without_the_backups(tmp_path: Path) -> None:
    """A listed backup that cannot be opened is listed all the same, with the reason; without logs none is opened."""
    root = parse(str(tmp_path))
    index = Index(open_store(root))
    for each in (entry("a", 2.0), entry("go", 1.0, engine="go"), entry("txn", 0.5, key_mode=KeyMode.TXN)):
        index.add(each)
    found = BackupsSource(root, windows=True).read()
    assert [each.entry.path for each in found.listed] == ["txn", "go", "a"]
    ((name, problem),) = found.baselines.items()
    assert name == entry("a", 2.0).id
    assert isinstance(problem, str)
    assert "a" in problem
    assert BackupsSource(root, windows=False).read().baselines == {}


class Fake:
    """A source that does what a test says."""

    def __init__(self, place: str, read: Callable[[], Any]) -> None:
        self.place, self.read = place, read

    def report(self, drill: str) -> bytes:
        """A page."""
        return f"{self.place}: {drill}".encode()


def test_one_source_does_not_hide_the_others() -> None:
    """One hangs, one fails, one breaks: the overview has the rest, and what is wrong with them; the end does not wait."""
    hangs = threading.Event()

    def hang() -> None:
        hangs.set()
        cancellation.sleep(3600)

    def fail() -> None:
        raise StorageUnreachable("s3://x does not answer: secret_access_key=abc", hint="Check account-key=abc.")

    def break_down() -> None:
        raise ZeroDivisionError("by nothing")

    sources = Sources(
        backups=(Fake("b", lambda: backups(entry("a", 1.0)).value), Fake("x", fail)),
        logs=(Fake("l", lambda: log().value),),
        syncs=(Fake("s", hang),),
        drills=cast("tuple[DrillSource, ...]", (Fake("d", lambda: (drill(1),)), Fake("y", break_down))),
    )
    with Watcher(sources, 3600.0, NO_LIMITS) as watcher:
        assert hangs.wait(60)
        eventually(lambda: sum(bool(each.source.read_ms) for each in shown(watcher)) == 3, 60)
        eventually(lambda: len(watcher.overview().findings) == 2, 60)
        found = watcher.overview(0.01)
        assert not watcher._all_read.is_set()
        assert [each.path for each in found.storages[0].backups] == ["a"]
        assert found.storages[0].backups[0].windows[0].log_id == "default"
        assert found.storages[1].source.error == "s3://x does not answer: secret_access_key=***"
        assert found.storages[1].source.hint == "Check account-key=***"
        assert found.drills[1].source.error == "unexpected ZeroDivisionError: by nothing"
        assert (found.status_pages[0].source.error, found.status_pages[0].source.read_ms) == ("", 0)
        assert watcher.report(0, drill(1).id) == f"d: {drill(1).id}".encode()
        assert [watcher.report(*given) for given in ((0, "../secret"), (1, drill(1).id), (9, drill(1).id))] == [
            None
        ] * 3
    assert not any(thread.is_alive() for thread in watcher._threads)


def shown(watcher: Watcher) -> list[Any]:
    """All parts of the overview that have a source."""
    found = watcher.overview()
    return [*found.storages, *found.archives, *found.status_pages, *found.drills, *found.gc]


def test_values_stay_when_a_source_falls_silent() -> None:
    """They are shown with the error, until the source answers again."""
    answers: list[Any] = [backups(entry("a", 1.0)).value]
    error = StorageUnreachable("away")

    def read() -> object:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    with Watcher(Sources(backups=(Fake("b", read),)), 0.01, NO_LIMITS) as watcher:
        first = watcher.overview(60.0).storages[0]
        assert [each.path for each in first.backups] == ["a"]
        answers.append(error)
        eventually(lambda: watcher.overview().storages[0].source.error == "away", 60)
        assert [each.path for each in watcher.overview().storages[0].backups] == ["a"]
        answers.append(replace(answers[0], listed=()))
        eventually(
            lambda: (
                watcher.overview().storages[0]
                == replace(
                    first,
                    backups=(),
                    newest=watcher.overview().storages[0].newest,
                    source=watcher.overview().storages[0].source,
                )
            ),
            60,
        )
        assert watcher.overview().storages[0].source.error == ""
