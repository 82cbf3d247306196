"""Status of running syncs on a terminal, in the log, as JSON lines and over HTTP; signals that stop them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from tikv_br.cli import log as logs
from tikv_br.cli import output
from tikv_br.cli.output import Output, human_bytes, human_seconds, use_colour
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import OutputClosed
from tikv_br.redaction import visible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group
    from rich.live import Live

    from tikv_br.incremental.feed.events import FeedStatus
    from tikv_br.incremental.status import SyncStatus
    from tikv_br.incremental.watch.status import NamedStatus, StatusSource


log = logging.getLogger(__name__)


COLUMNS = ("sync", "behind", "writes", "events/s", "written", "regions", "stores", "sorter", "retries")
DROP = ("stores", "sorter", "regions", "retries", "written", "writes", "events/s")
LIVE_SECONDS = 1.0
"""Interval between redraws of a terminal."""
JOIN_SECONDS = 10.0


Show = Callable[["Sequence[NamedStatus]"], None]
"""Shows all syncs as they are now."""


@contextmanager
def watching(out: Output, watched: StatusSource, flags: StatusFlags, *, lines: bool = False) -> Iterator[str]:
    """Show the status of syncs, and serve it if asked to; `lines`: as lines, not as a table.

    Yields the status address, ``""`` = none. Raises `UsageError` if the address cannot be used.
    """
    with (
        serving(out, watched, flags) as address,
        _display(out, flags, lines=lines) as (seconds, show),
        repeated(seconds, lambda: show([each.redacted() for each in watched()])),
    ):
        yield address


@contextmanager
def serving(out: Output, watched: StatusSource, flags: StatusFlags) -> Iterator[str]:
    """Serve the status of syncs, if asked to; yields the address for others, ``""`` = none.

    Raises `UsageError` if the address cannot be used.
    """
    address = flags.address()
    if address is None:
        yield ""
        return
    from tikv_br.incremental.watch.server import serve

    with serve(
        address, lambda: [each.redacted() for each in watched()], max_lag=flags.max_lag, key=flags.key()
    ) as chosen:
        show_address(out, f"http://{chosen}/", flags.key_file())
        yield str(chosen.reachable)


@contextmanager
def _display(out: Output, flags: StatusFlags, *, lines: bool) -> Iterator[tuple[float, Show]]:
    """The display, and the seconds between its updates."""
    if out.is_json:
        yield flags.status_every, lambda found: _write_statuses(out, found)
    elif lines or not use_colour(sys.stderr):
        yield flags.status_every, _log_statuses
    else:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=sys.stderr), auto_refresh=False) as live, logs.through(sys.stderr):
            yield LIVE_SECONDS, LiveView(live, flags)


@contextmanager
def repeated(seconds: float, show: Callable[[], None]) -> Iterator[None]:
    """Call `show` at intervals, in a thread."""
    done = threading.Event()

    def run() -> None:
        try:
            while not done.wait(seconds):
                show()
        except OutputClosed:
            log.warning("standard output was closed: no more status lines")

    thread = threading.Thread(target=run, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(JOIN_SECONDS)


class LiveView:
    """A table on a terminal; with a log file, also lines in it."""

    def __init__(self, live: Live, flags: StatusFlags) -> None:
        self._live, self._flags = live, flags
        self._next_lines = time.monotonic() + flags.status_every

    def __call__(self, found: Sequence[NamedStatus]) -> None:
        """Redraw the table."""
        self._live.update(draw(found, self._flags.max_lag, self._live.console.width), refresh=True)
        if logs.has_file() and time.monotonic() >= self._next_lines:
            self._next_lines = time.monotonic() + self._flags.status_every
            _log_statuses(found)


def describe(status: SyncStatus) -> str:
    """The status as one line."""
    from tikv_br.incremental.watch.status import current_problems

    lag = "" if status.write_lag is None else f"write lag {status.write_lag:.1f} s, "
    held = human_bytes(status.sorter_memory_bytes + status.sorter_disk_bytes)
    return (
        f"checkpoint {show_ts(status.checkpoint_ts, age=False)} ({status.checkpoint_lag:.1f} s behind), {lag}"
        f"{status.written:,} rows written, "
        f"{status.events_per_second:,.0f} events/s, regions {_regions(status.feed)}, sorter {held}"
        + "".join(f", {each}" for each in current_problems(status))
    )


def draw(found: Sequence[NamedStatus], max_lag: float, width: int | None = None) -> Group:
    """All syncs as a table, with problems below it."""
    from rich.console import Group
    from rich.text import Text

    from tikv_br.incremental.watch.status import current_problems

    problems = []
    for each in found:
        problem = each.problem(max_lag)
        if problem:
            problems.append(Text(visible(f"{each.name}: {problem}"), style="bold red"))
        if each.status is not None:
            more = [line for line in current_problems(each.status) if line not in problem]
            problems += [Text(visible(f"{each.name}: {line}"), style="yellow") for line in more]
    idle = ("",) * (len(COLUMNS) - 1)
    rows = [(visible(each.name), *(_cells(each.status) if each.status is not None else idle)) for each in found]
    return Group(Text(output.table(COLUMNS, rows, width, drop=DROP)), *problems)


def _cells(status: SyncStatus) -> tuple[str, ...]:
    return (
        human_seconds(status.checkpoint_lag),
        "-" if status.write_lag is None else human_seconds(status.write_lag),
        f"{status.events_per_second:,.0f}",
        f"{status.written:,}",
        _regions(status.feed),
        f"{status.feed.stores:,}",
        human_bytes(status.sorter_memory_bytes + status.sorter_disk_bytes),
        f"{status.sink_failures + sum(status.feed.errors.values()):,}",
    )


def _regions(feed: FeedStatus) -> str:
    """Followed and known regions."""
    return f"{feed.regions - feed.scanning:,}/{feed.regions + feed.holes:,}"


def _log_statuses(found: Sequence[NamedStatus]) -> None:
    for each in found:
        log.info("%s: %s", each.name, each.idle if each.status is None or each.error else describe(each.status))


def _write_statuses(out: Output, found: Sequence[NamedStatus]) -> None:
    for each in found:
        figures = asdict(each.status) if each.status is not None else {}
        out.result("status", {"name": each.name, "error": each.error, "waiting": each.waiting} | figures)


def show_address(out: Output, url: str, key_file: Path | None) -> None:
    """Show where the status server listens."""
    if out.is_json:
        out.result("listening", {"url": url, "key_file": str(key_file or "")})
    else:
        log.info("/status, /healthz and /metrics at %s%s", url, (key_file and f", the key in {key_file}") or "")
