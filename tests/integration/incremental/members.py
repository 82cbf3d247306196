"""Captures in threads of a test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.etcd import Etcd
from tikv_br.errors import TikvBrError
from tikv_br.incremental.group.capture import Capture
from tikv_br.incremental.group.model import GroupState
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.group.worker import CaptureOptions

JOIN_SECONDS = 90.0


class Quick(CaptureOptions):
    """However long its lease is, it looks as often, and its requests take as long, as with one of four seconds."""

    __slots__ = ()
    write_timeout = 4.0
    poll_seconds = 0.4


@contextlib.contextmanager
def member(etcd: Etcd, source: Cluster, scratch: Path, lease: int) -> Iterator[threading.Event]:
    """A capture that runs for the length of the block; the event ends it. Fails when it ended by an error."""
    stop = threading.Event()
    errors: list[TikvBrError] = []

    def run() -> None:
        try:
            Capture(etcd, source, Quick(scratch, lease)).run(stop)
        except TikvBrError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="capture")
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(JOIN_SECONDS)
    assert not thread.is_alive()
    assert not errors


def wait_for_state(
    store: GroupStore, what: str, is_there: Callable[[GroupState], object], patience: float
) -> GroupState:
    """Wait for what a group keeps in etcd to be so."""
    until = time.monotonic() + patience
    while not is_there(state := store.snapshot()):
        assert time.monotonic() < until, f"{what}: {state}"
        time.sleep(0.05)
    return state
