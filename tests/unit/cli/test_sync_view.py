"""Display of syncs: live on a terminal, lines in a log, JSON lines."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.documented import assert_documented
from tests.support.tools import Terminal
from tests.unit.incremental.statuses import status
from tikv_br.cli import log
from tikv_br.cli.output import Output, OutputForm
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.sync_view import describe, draw, watching
from tikv_br.incremental.feed.events import FeedStatus
from tikv_br.incremental.watch.status import NamedStatus

SECRET = "refused: secret-access-key=hunter2"
QUICK = StatusFlags(status_every=0.01)


class Watched:
    """Two syncs, and whether they were looked at often enough."""

    def __init__(self) -> None:
        self.looks = threading.Semaphore(0)

    def __call__(self) -> Sequence[NamedStatus]:
        """See the class."""
        self.looks.release()
        return [
            NamedStatus("a", status(last_error=SECRET, sink_failing_seconds=12.3)),
            NamedStatus("b", None, error=SECRET),
        ]

    def wait(self) -> None:
        """Until one look has been shown for certain: the next one has begun."""
        for _ in range(2):
            assert self.looks.acquire(timeout=60)


def test_a_terminal_obeys_no_name_and_no_error() -> None:
    """Names come from etcd, errors from servers."""
    evil = "\x1b]0;title\x07\u202e\n"
    console = Console(file=io.StringIO(), width=200)
    named = [
        NamedStatus(f"a{evil}", status(last_error=f"x{evil}", sink_failing_seconds=99.0)),
        NamedStatus(evil, None, error=evil),
    ]
    console.print(draw(named, 1.0, 200))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert shown.count("\\x1b") >= 4


def test_json_lines_hold_every_figure_and_no_secret() -> None:
    """Each while there is a line for every sync, as documented."""
    stream, watched = io.StringIO(), Watched()
    with watching(Output(OutputForm.JSON, stream), watched, QUICK):
        watched.wait()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert_documented(["sync"], lines)
    first, second = lines[:2]
    assert (first["message_type"], first["name"], first["checkpoint_ts"]) == ("status", "a", 470_623_261_766_451_301)
    assert first["feed"]["errors"] == {"not_leader": 3, "stalled": 1}
    assert second.items() >= {"name": "b", "error": "refused: secret-access-key=***"}.items()
    assert "hunter2" not in stream.getvalue()


def test_lines_go_to_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal every sync has one calm line each while."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    watched = Watched()
    with caplog.at_level(logging.INFO, "tikv_br"), watching(Output(), watched, QUICK):
        watched.wait()
    assert caplog.messages[0] == (
        "a: checkpoint 470623261766451301 = 2026-11-21 18:21:09 UTC (3.0 s behind), write lag 0.7 s, 3,000 rows written, 2,000 events/s, "
        "regions 48/51, sorter 3.0 MiB, the sink has accepted no writes for 12 s: refused: secret-access-key=***"
    )
    assert caplog.messages[1] == "b: refused: secret-access-key=***"


def test_a_terminal_shows_it_live_and_log_lines_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is redrawn; log messages stand above it, and stderr is restored in the end."""
    terminal, watched = Terminal(), Watched()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tikv_br.cli.sync_view.LIVE_SECONDS", 0.01)
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers := [logging.StreamHandler(terminal)])
    with watching(Output(), watched, StatusFlags()):
        watched.wait()
        logging.getLogger("tikv_br").warning("a store is slow")
    assert "48/51" in terminal.getvalue()
    assert "a store is slow\n" in terminal.getvalue()
    assert "hunter2" not in terminal.getvalue()
    assert sys.stderr is terminal
    assert handlers[0].stream is terminal


def test_a_reader_that_goes_away_does_not_end_the_sync(caplog: pytest.LogCaptureFixture) -> None:
    """Status lines stop, with a word in the log; what is watched goes on."""

    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    watched = Watched()
    with caplog.at_level(logging.WARNING, "tikv_br"), watching(Output(OutputForm.JSON, Closed()), watched, QUICK):
        assert watched.looks.acquire(timeout=60)
    assert "standard output was closed" in caplog.text


def test_the_table_fits_a_narrow_terminal() -> None:
    """Eighty columns hold a row of figures, and beneath it all that is wrong."""
    stream = io.StringIO()
    found = [NamedStatus("default", status(checkpoint_lag=4000.0, events=10**9, written=10**8)), NamedStatus("b", None)]
    Console(file=stream, width=80).print(draw(found, 300.0, 80))
    lines = stream.getvalue().splitlines()
    assert lines[1].split() == ["default", "1h06m", "0.70s", "2,000", "100,000,000", "48/51", "3.0", "MiB", "6"]
    assert lines[3].startswith("(not shown: stores;")
    assert "".join(lines[4:]).replace(" ", "").startswith("default:4000sbehind,whichismorethan300s")
    assert any(line.startswith("b: has not started yet") for line in lines)


def test_one_line_says_no_more_than_there_is() -> None:
    """Without failures of the sink nothing is said of them, and of those that are over no more than how many there were."""
    assert describe(status(sink_failures=0)).endswith("sorter 3.0 MiB")
    assert describe(status()).endswith("sorter 3.0 MiB, the sink has failed 2 times so far")


def test_a_source_that_cannot_be_followed_is_told_with_the_cause() -> None:
    """In the line of a log and beneath the table, once it is more than a moment's trouble."""
    feed = FeedStatus(failing_seconds=41.2, last_error="no PD answers")
    said = "part of the source has had no subscription for 41 s: no PD answers"
    assert describe(status(feed=feed)).endswith(f", {said}")
    assert "source" not in describe(status(feed=replace(feed, failing_seconds=1.0)))
    stream = io.StringIO()
    Console(file=stream, width=120).print(draw([NamedStatus("a", status(feed=feed))], 300.0))
    assert f"a: {said}" in stream.getvalue()
    behind = NamedStatus("a", status(feed=feed, checkpoint_lag=44.0))
    assert behind.problem(40.0) == f"44 s behind, which is more than 40 s: {said}"


def test_stderr_is_handed_back_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """`log.through` leads our lines elsewhere for a while, and leaves log files alone."""
    elsewhere, before = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(before)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])  # not what other tests have left there
    with log.through(elsewhere):
        assert handler.stream is elsewhere
    assert handler.stream is before
