"""Progress displays: a bar on a terminal, lines in a log, JSON lines for scripts.

Bars and lines go to stderr, JSON lines to stdout.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any, Self, TextIO

from tikv_br.cli import log
from tikv_br.cli.output import Output, human_bytes, human_seconds, picked, use_colour
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted, StepUndone, TasksProgress
from tikv_br.redaction import visible

LINE_SECONDS, LASTING_SECONDS = 10.0, 1.0
JSON_SECONDS = 30.0
BRIEF_SECONDS = 0.5
"""Steps shorter than this, in seconds, leave no line on a terminal."""
NARROW, WIDE = 70, 85
"""Columns of a terminal: below, a bar has figures only; above, it has a bar."""
LOG_PERCENT, LOG_SECONDS = 10, 300.0
"""Distance between lines of progress in a log file: 10 % or 5 minutes."""


class ProgressDisplay:
    """A context manager that is called with every event. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, event: Event) -> None:
        """Show one event."""


def progress_display(output: Output, stream: TextIO | None = None) -> ProgressDisplay:
    """Return the display for ``output`` and ``stream`` (default: stderr).

    With a log file, progress is logged there, and also shown on a terminal or as JSON lines.
    """
    display = _display(output, sys.stderr if stream is None else stream)
    return LoggedProgress(display) if log.has_file() else display


def _display(output: Output, stream: TextIO) -> ProgressDisplay:
    if log.is_quiet():
        return WarningDisplay(output, stream)
    if output.is_json:
        return JsonProgress(output)
    if use_colour(stream):
        return BarProgress(stream)
    return ProgressDisplay() if log.has_file() and not stream.isatty() else LineProgress(stream)


class WarningDisplay(ProgressDisplay):
    """Shows warnings only."""

    def __init__(self, output: Output, stream: TextIO) -> None:
        self._output, self._stream = output, stream

    def __call__(self, event: Event) -> None:
        """Write a warning."""
        if not isinstance(event, Notice) or not event.warning:
            return
        if self._output.is_json:
            self._output.result("notice", {"message": event.message, "warning": event.warning})
            return
        with contextlib.suppress(OSError):
            self._stream.write(f"{describe(event)}\n")
            self._stream.flush()


class _Pace:
    """Limits task progress to a line every `percent`, and at least one every `seconds`."""

    def __init__(self, percent: int = 1, seconds: float = JSON_SECONDS) -> None:
        self._step, self._seconds = percent, seconds
        self._part = -1
        self._next_time = time.monotonic() + seconds

    def due(self, fraction: float) -> bool:
        part, now = int(fraction * 100) // self._step, time.monotonic()
        if part <= self._part and now < self._next_time:
            return False
        self._part = part
        self._next_time = now + self._seconds
        return True


class LineProgress(ProgressDisplay):
    """A line each `LINE_SECONDS`, and one for each finished step that took `LASTING_SECONDS` or more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._step, self._figures = "", ""
        self._next_time = time.monotonic() + LINE_SECONDS

    def __call__(self, event: Event) -> None:
        """Write a line if one is due."""
        match event:
            case StepStarted():
                self._step, self._figures = f"{describe(event)}: ", ""
                self._next_time = time.monotonic() + LINE_SECONDS
            case TasksProgress():
                self._figures = f", {_amounts(event)}"
                if time.monotonic() >= self._next_time:
                    self._next_time = time.monotonic() + LINE_SECONDS
                    self._write(self._step + describe(event).lstrip())
            case StepFinished(seconds=seconds):
                if seconds >= LASTING_SECONDS:
                    self._write(describe(event) + self._figures)
                self._figures = ""
            case _:
                self._write(describe(event))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the work
            self._stream.write(line + "\n")
            self._stream.flush()


class JsonProgress(ProgressDisplay):
    """One JSON line of ``message_type`` ``step`` or ``progress`` an event, with a line of progress each 1 % or 30 s."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._pace = _Pace()

    def __call__(self, event: Event) -> None:
        """Write a JSON line if one is due."""
        match event:
            case StepStarted(name, number, total):
                self._pace = _Pace()
                self._output.result("step", {"name": name, "number": number, "total": total, "state": "started"})
            case StepFinished(name, number, total, seconds):
                fields = {"name": name, "number": number, "total": total, "state": "finished"}
                self._output.result("step", {**fields, "seconds": round(seconds, 3)})
            case StepUndone(name, problem):
                self._output.result("step", {"name": name, "state": "undone", "problem": problem})
            case Notice():
                self._output.result("notice", {"message": event.message, "warning": event.warning})
            case TasksProgress() if self._pace.due(event.fraction):
                fields = {
                    **picked(event, "tasks_done", "tasks_total", "bytes_planned"),
                    "fraction": round(event.fraction, 4),
                    "bytes": event.bytes_done,
                    "keys": event.keys_done,
                    "seconds": round(event.seconds, 3),
                }
                self._output.result("progress", fields)
            case _:
                pass


class BarProgress(ProgressDisplay):
    """A bar for the running step, and a line for each finished step that took `BRIEF_SECONDS` or more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Any = None  # rich's Progress, loaded with the first event
        self._shown = contextlib.ExitStack()
        self._task: Any = None

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def __call__(self, event: Event) -> None:
        """Move the bar."""
        progress = self._started()
        match event:
            case StepStarted(name, number, total):
                if self._task is not None:
                    progress.remove_task(self._task)
                self._task = progress.add_task(f"{number}/{total} {name}", total=None, figures="")
            case TasksProgress(fraction=fraction):
                if self._task is None:
                    self._task = progress.add_task("tasks", total=None, figures="")
                figures = f"{_percent(event)} {human_bytes(event.bytes_done)}, {_speed(event)}{_remaining_time(event)}"
                progress.update(self._task, total=1.0, completed=fraction, figures=figures)
            case StepFinished(seconds=seconds) if seconds < BRIEF_SECONDS:
                pass  # the log and JSON keep it
            case _:
                progress.console.print(describe(event), highlight=False, markup=False)

    def _started(self) -> Any:  # noqa: ANN401 - rich is imported here only
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

            console = Console(file=self._stream)
            figures = TextColumn("{task.fields[figures]}")
            columns: list[ProgressColumn] = [TextColumn("{task.description}"), figures, TimeElapsedColumn()]
            if console.width < NARROW:
                columns = [figures]
            elif console.width > WIDE:
                columns.insert(1, BarColumn(bar_width=min(console.width - WIDE, 40)))
            self._progress = Progress(*columns, console=console, transient=True)
            self._shown.enter_context(self._progress)
            self._shown.enter_context(log.through(sys.stderr))  # rich's, which keeps log lines off the bar
        return self._progress


class LoggedProgress(ProgressDisplay):
    """Logs events, and passes them on to another display."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._pace = _Pace(LOG_PERCENT, LOG_SECONDS)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def __call__(self, event: Event) -> None:
        """Log and show one event."""
        if isinstance(event, StepStarted):
            self._pace = _Pace(LOG_PERCENT, LOG_SECONDS)
        if not isinstance(event, TasksProgress) or self._pace.due(event.fraction):
            is_warning = isinstance(event, Notice) and event.warning
            logging.getLogger(__name__).log(logging.WARNING if is_warning else logging.INFO, "%s", describe(event))
        self._display(event)


def describe(event: Event) -> str:
    """Return an event as a line for people."""
    match event:
        case StepStarted(name, number, total):
            return f"step {number}/{total}: {name}"
        case StepFinished(name, number, total, seconds):
            return f"step {number}/{total}: {name}: done in {human_seconds(seconds)}"
        case StepUndone(name, "") if name.startswith("acquire "):
            return f"released {name.removeprefix('acquire ')}"
        case StepUndone(name, ""):
            return f"undone: {name}"
        case StepUndone(name, problem):
            return visible(f"NOT undone: {name}: {problem}")
        case Notice(message, warning):
            return visible(f"Warning: {message}" if warning else message)
        case TasksProgress(tasks_done=tasks, tasks_total=total):
            of_tasks = f"{tasks:,}/{total:,} tasks, " if total else ""
            elapsed = f"{_duration(event.seconds)} elapsed"
            return f"{_percent(event)}  {of_tasks}{_amounts(event)}, {elapsed}{_remaining_time(event)}"


def _percent(event: TasksProgress) -> str:
    return f"{int(event.fraction * 100):3}%"  # 100 % only if all is done


def _amounts(event: TasksProgress) -> str:
    keys, size = f"{event.keys_done:,} {'key' if event.keys_done == 1 else 'keys'}", human_bytes(event.bytes_done)
    if event.fraction < 1 and event.bytes_planned > event.bytes_done:
        size += f" of about {human_bytes(event.bytes_planned)}"
    return f"{keys}, {size}, {_speed(event)}"


def _speed(event: TasksProgress) -> str:
    return f"{human_bytes(event.bytes_done / event.seconds if event.seconds > 0 else 0.0)}/s"


def _remaining_time(event: TasksProgress) -> str:
    """The estimate, once there is something to go by."""
    if not 0.01 <= event.fraction < 1 or event.seconds < 1:
        return ""
    return f", {_duration(event.seconds * (1 - event.fraction) / event.fraction)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 60 else human_seconds(seconds)
