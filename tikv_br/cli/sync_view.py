"""How syncs are doing, as a command shows it: live on a terminal, calm lines in a log, JSON lines, and over HTTP."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tikv_br.cli import log as logs
from tikv_br.cli.output import Output, use_colour
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import OutputClosed
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group
    from rich.live import Live

    from incremental.feed.status import FeedStatus
    from incremental.replicate import Replicator, SyncStatus
    from incremental.watch.named import NamedStatus, Watched

log = logging.getLogger(__name__)

LIVE_SECONDS = 1.0
"""How often a terminal is drawn anew."""
JOIN_SECONDS = 10.0
NOT_BEGUN = "has not begun yet"


Show = Callable[["Sequence[NamedStatus]"], None]
"""Shows all syncs as they are now."""


class Running:
    """The one sync of a process, for those who look on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._replicator: Replicator | None = None

    def begin(self, replicator: Replicator) -> None:
        """It is about to run."""
        self._replicator = replicator

    def __call__(self) -> Sequence[NamedStatus]:
        """How it is doing."""
        from incremental.watch.named import NamedStatus

        return [NamedStatus(self._name, None if self._replicator is None else self._replicator.status())]


@contextmanager
def watching(out: Output, watched: Watched, flags: StatusFlags, *, lines: bool = False) -> Iterator[str]:
    """Tell how syncs are doing until left, and serve it if asked to; with `lines`, in no other way than lines.

    Gives the address that it is served at, ``""`` = nowhere.

    Raises `UsageError` for an address that cannot be had.
    """
    with (
        serving(out, watched, flags) as address,
        _display(out, flags, lines=lines) as (seconds, show),
        _repeated(seconds, lambda: show(_redacted(watched()))),
    ):
        yield address


@contextmanager
def serving(out: Output, watched: Watched, flags: StatusFlags) -> Iterator[str]:
    """Serve how syncs are doing until left, if asked to; gives the address as others may call it, ``""`` = nowhere.

    Raises `UsageError` for an address that cannot be had.
    """
    address = flags.address()
    if address is None:
        yield ""
        return
    from incremental.watch.server import serve

    with serve(address, lambda: _redacted(watched()), max_lag=flags.max_lag, key=flags.key()) as chosen:
        _tell_address(out, f"http://{chosen}/", flags.key_file())
        yield str(chosen.reachable)


@contextmanager
def _display(out: Output, flags: StatusFlags, *, lines: bool) -> Iterator[tuple[float, Show]]:
    """What fits the reader, and how many seconds are between two showings."""
    if out.is_json:
        yield flags.status_every, lambda found: _tell_statuses(out, found)
    elif lines or not use_colour(sys.stderr):
        yield flags.status_every, _log_statuses
    else:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=sys.stderr), auto_refresh=False) as live, logs.through(sys.stderr):
            yield LIVE_SECONDS, LiveView(live, flags)


@contextmanager
def _repeated(seconds: float, show: Callable[[], None]) -> Iterator[None]:
    """Show it every while, in a thread."""
    done = threading.Event()

    def run() -> None:
        try:
            while not done.wait(seconds):
                show()
        except OutputClosed:
            log.warning("nobody reads standard output any more: no more status lines")

    thread = threading.Thread(target=run, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(JOIN_SECONDS)


class LiveView:
    """A table on a terminal; with a log file, lines in there as well."""

    def __init__(self, live: Live, flags: StatusFlags) -> None:
        self._live, self._flags = live, flags
        self._next_lines = time.monotonic() + flags.status_every

    def __call__(self, found: Sequence[NamedStatus]) -> None:
        """Draw it anew."""
        self._live.update(draw(found, self._flags.max_lag), refresh=True)
        if logs.has_file() and time.monotonic() >= self._next_lines:
            self._next_lines = time.monotonic() + self._flags.status_every
            _log_statuses(found)


def describe(status: SyncStatus) -> str:
    """One calm line."""
    held = human_bytes(status.sorter_memory_bytes + status.sorter_disk_bytes)
    return (
        f"checkpoint {status.checkpoint_ts} ({status.checkpoint_lag:.1f} s behind), {status.written:,} rows written, "
        f"{status.events_per_second:,.0f} events/s, regions {_regions(status.feed)}, sorter {held}"
        + "".join(f", {each}" for each in _troubles(status))
    )


def _troubles(status: SyncStatus) -> Iterator[str]:
    """What goes wrong now, and how often the sink has failed before."""
    if status.sink_failing_seconds:
        yield f"the sink has taken nothing for {status.sink_failing_seconds:.0f} s: {status.last_error}"
    elif status.sink_failures:
        yield f"the sink has failed {status.sink_failures:,} times so far"
    if status.feed.trouble:
        yield status.feed.trouble


def draw(found: Sequence[NamedStatus], max_lag: float) -> Group:
    """All syncs as a table, with what is wrong beneath it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("sync", box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for title in ("behind", "resolved", "events/s", "written", "regions", "stores", "sorter", "retries"):
        table.add_column(title, justify="right", no_wrap=True)
    beneath = []
    for each in found:
        table.add_row(each.name, *(_cells(each.status) if each.status is not None else ()))
        trouble = each.trouble(max_lag)
        if trouble:
            beneath.append(Text(f"{each.name}: {trouble}", style="bold red"))
        if each.status is not None:
            more = [said for said in _troubles(each.status) if said not in trouble]
            beneath += [Text(f"{each.name}: {said}", style="yellow") for said in more]
    return Group(table, *beneath)


def _cells(status: SyncStatus) -> tuple[str, ...]:
    return (
        human_seconds(status.checkpoint_lag),
        human_seconds(status.resolved_lag),
        f"{status.events_per_second:,.0f}",
        f"{status.written:,}",
        _regions(status.feed),
        f"{status.feed.stores:,}",
        human_bytes(status.sorter_memory_bytes + status.sorter_disk_bytes),
        f"{status.sink_failures + sum(status.feed.errors.values()):,}",
    )


def _regions(feed: FeedStatus) -> str:
    """How many are followed, of how many, as far as is known."""
    return f"{feed.regions - feed.scanning:,}/{feed.regions + feed.holes:,}"


def _log_statuses(found: Sequence[NamedStatus]) -> None:
    for each in found:
        said = each.error or (NOT_BEGUN if each.status is None else describe(each.status))
        log.info("%s: %s", each.name, said)


def _tell_statuses(out: Output, found: Sequence[NamedStatus]) -> None:
    for each in found:
        figures = _figures(each.status) if each.status is not None else {}
        out.result("status", {"name": each.name, "error": each.error} | figures)


def _figures(status: SyncStatus) -> dict[str, object]:
    return asdict(status)


def _tell_address(out: Output, url: str, key_file: Path | None) -> None:
    if out.is_json:
        out.result("listening", {"url": url, "key_file": str(key_file or "")})
    else:
        log.info(
            "status page, /status, /healthz and /metrics at %s%s", url, (key_file and f", the key in {key_file}") or ""
        )


def _redacted(found: Sequence[NamedStatus]) -> list[NamedStatus]:
    """As they may be shown to anyone."""

    def redacted(status: SyncStatus | None) -> SyncStatus | None:
        if status is None:
            return None
        feed = replace(status.feed, last_error=redact(status.feed.last_error))
        return replace(status, last_error=redact(status.last_error), feed=feed)

    return [replace(each, error=redact(each.error), status=redacted(each.status)) for each in found]
