"""Progress: a bar, calm lines or JSON lines for the same events."""

from __future__ import annotations

import io
import json
import re
import time

import pytest

from tests.support.tools import Terminal
from tikv_br.cli.output import Output, OutputForm
from tikv_br.cli.progress import BarProgress, JsonProgress, LineProgress, describe, progress_display
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted, StepUndone, TasksProgress


def tasks(fraction: float) -> TasksProgress:
    """Return progress of 200 tasks of a MiB each."""
    return TasksProgress(
        int(fraction * 200), 200, int(fraction * 200) << 20, int(fraction * 1000), fraction, 10.0, 200 << 20
    )


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


def test_lines_are_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe a step has a line every 10 s, with percent, amounts, rate, elapsed and remaining time, and a last one."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    with LineProgress(stream) as display:
        display(EVENTS[0])
        for event in EVENTS[1:-3]:
            now += 1 / 128  # 2,000 events in 15.6 s
            display(event)
        for event in EVENTS[-3:]:
            display(event)
    assert stream.getvalue().splitlines() == [
        "step 2/9: scan: 63%  127/200 tasks, 639 keys, 127.0 MiB of about 200.0 MiB, 12.7 MiB/s, 10s elapsed, 6s left",
        "step 2/9: scan: done in 12.3s, 1,000 keys, 200.0 MiB, 20.0 MiB/s",
        "2 stores are slow",
        "NOT undone: import mode: no answer",
    ]


def test_brief_steps_leave_no_line() -> None:
    """A step of less than a second is kept by the log and by JSON only."""
    stream = io.StringIO()
    display = LineProgress(stream)
    display(StepStarted("connect", 1, 2))
    display(tasks(0.5))
    display(StepFinished("connect", 1, 2, 0.99))
    display(StepStarted("scan", 2, 2))
    display(StepFinished("scan", 2, 2, 1.0))
    assert stream.getvalue() == "step 2/2: scan: done in 1.00s\n"


def test_undone_steps_are_named() -> None:
    """A lock is released; other steps are named as they were when they ran."""
    assert describe(StepUndone("acquire the restore lock")) == "released the restore lock"
    assert describe(StepUndone("set the download limit")) == "undone: set the download limit"


def test_it_is_100_percent_only_once_all_is_done() -> None:
    """A percent is rounded down, and nothing is estimated before there is something to go by."""
    assert describe(tasks(0.999)).startswith(" 99%")
    assert describe(tasks(1.0)) == "100%  200/200 tasks, 1,000 keys, 200.0 MiB, 20.0 MiB/s, 10s elapsed"
    assert "left" not in describe(tasks(0.005))
    assert describe(TasksProgress(0, 0, 1 << 20, 9, 0.5, 600.0)).endswith("10m00s elapsed, 10m00s left")


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


@pytest.mark.parametrize(("width", "shown"), [(40, "50% 100.0 MiB, 10.0 MiB/s, 10s left"), (80, "scan 50% 100.0 MiB")])
def test_a_bar_cuts_no_figure(width: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow terminals get the figures without the bar."""
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    with BarProgress(stream) as display:
        display(StepStarted("scan", 2, 9))
        display(tasks(0.5))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert " ".join(shown.split()) in " ".join(text.split())
    assert "…" not in text


def test_bar_leaves_no_line_for_brief_steps() -> None:
    """On a terminal a step of less than half a second leaves no line; JSON keeps it."""
    brief, long = StepFinished("connect", 1, 2, 0.499), StepFinished("scan", 2, 2, 0.5)
    terminal, scripts = Terminal(), io.StringIO()
    displays = (BarProgress(terminal), JsonProgress(Output(OutputForm.JSON, scripts)))
    for display in displays:
        with display:
            display(brief)
            display(long)
    assert "connect" not in terminal.getvalue()
    assert "step 2/2: scan: done in 0.50s" in terminal.getvalue()
    assert "connect" in scripts.getvalue()
    assert "scan" in scripts.getvalue()


def test_bar_that_saw_nothing_shows_nothing() -> None:
    """An error before the first event leaves the terminal as it was."""
    stream = Terminal()
    with BarProgress(stream):
        pass
    assert stream.getvalue() == ""
