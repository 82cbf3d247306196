"""Progress: a bar, calm lines or JSON lines for the same events."""

from __future__ import annotations

import io
import json
import time

import pytest

from tests.support.tools import Terminal
from tikv_br.cli.output import Output, OutputForm
from tikv_br.cli.progress import BarProgress, JsonProgress, LineProgress, progress_display
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted, StepUndone, TasksProgress


def tasks(fraction: float) -> TasksProgress:
    """Return progress of 200 tasks of a MiB each."""
    return TasksProgress(int(fraction * 200), 200, int(fraction * 200) << 20, int(fraction * 1000), fraction, 10.0)


EVENTS: list[Event] = [
    StepStarted("scan", 2, 9),
    *(tasks(number / 2000) for number in range(2001)),
    StepFinished("scan", 2, 9, 12.345),
    Notice("2 stores are slow"),
    StepUndone("import mode", "no answer"),
]


def test_display_fits_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts get JSON, terminals a bar, everything else lines."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress_display(Output(OutputForm.JSON, io.StringIO()), Terminal()), JsonProgress)
    assert isinstance(progress_display(Output(stream=io.StringIO()), Terminal()), BarProgress)
    assert isinstance(progress_display(Output(stream=io.StringIO()), io.StringIO()), LineProgress)


def test_lines_are_calm() -> None:
    """Two thousand events make a line each 1 %, the last at 100 %, with tasks, keys, bytes and speed."""
    stream = io.StringIO()
    with LineProgress(stream) as display:
        for event in EVENTS:
            display(event)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 2/9: scan"
    assert 95 <= len([line for line in lines if "tasks" in line]) <= 101
    assert "100%  200/200 tasks, 1,000 keys, 200.0 MiB, 20.0 MiB/s" in lines
    assert lines[-3:] == [
        "step 2/9: scan: done in 12.3s",
        "2 stores are slow",
        "NOT undone: import mode: no answer",
    ]


def test_slow_progress_still_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a percent's progress there is a line after 30 s, and none before."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    display = LineProgress(stream)
    display(tasks(0.5))
    for seconds, lines in ((10, 1), (29, 1), (31, 2), (32, 2), (62, 3)):
        now = 1000.0 + seconds
        display(tasks(0.5))
        assert len(stream.getvalue().splitlines()) == lines


def test_json_lines_have_types_and_figures() -> None:
    """Every line has its ``message_type``; steps carry state and number, progress the figures as numbers."""
    stream = io.StringIO()
    with JsonProgress(Output(OutputForm.JSON, stream)) as display:
        for event in EVENTS:
            display(event)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (
        lines[0].items()
        >= {"message_type": "step", "name": "scan", "number": 2, "total": 9, "state": "started"}.items()
    )
    assert {line["message_type"] for line in lines} == {"step", "progress", "notice"}
    last = [line for line in lines if line["message_type"] == "progress"][-1]
    figures = {"fraction": 1.0, "tasks_done": 200, "tasks_total": 200, "bytes": 200 << 20, "keys": 1000}
    assert last.items() >= {"message_type": "progress", **figures, "seconds": 10.0}.items()
    assert (
        lines[-1].items()
        >= {"message_type": "step", "name": "import mode", "state": "undone", "problem": "no answer"}.items()
    )


def test_bar_is_drawn_and_leaves_the_lines_that_matter() -> None:
    """A terminal sees the step, its figures, and in the end what was done and what was not."""
    stream = Terminal()
    with BarProgress(stream) as display:
        for event in EVENTS:
            display(event)
    shown = stream.getvalue()
    assert "step 2/9: scan: done in 12.3s" in shown
    assert "NOT undone: import mode: no answer" in shown


def test_bar_leaves_no_line_for_brief_steps() -> None:
    """On a terminal a step of less than half a second leaves no line; log lines and JSON keep it."""
    brief, long = StepFinished("connect", 1, 2, 0.499), StepFinished("scan", 2, 2, 0.5)
    terminal, lines, scripts = Terminal(), io.StringIO(), io.StringIO()
    displays = (BarProgress(terminal), LineProgress(lines), JsonProgress(Output(OutputForm.JSON, scripts)))
    for display in displays:
        with display:
            display(brief)
            display(long)
    assert "connect" not in terminal.getvalue()
    assert "step 2/2: scan: done in 0.50s" in terminal.getvalue()
    for kept in (lines, scripts):
        assert "connect" in kept.getvalue()
        assert "scan" in kept.getvalue()


def test_bar_that_saw_nothing_shows_nothing() -> None:
    """An error before the first event leaves the terminal as it was."""
    stream = Terminal()
    with BarProgress(stream):
        pass
    assert stream.getvalue() == ""
