"""Calls by which operations change the world: each is a moment to die at, whatever its step."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import tikv_br.storage.local
from tests.integration.crash.cells import FULL
from tests.support.forks import Forks
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.cluster.puts import ColumnWriter
from tikv_br.cluster.store import StoreClient
from tikv_br.storage.local import LocalObjectStore

SEAMS: tuple[tuple[Any, str], ...] = (
    (tikv_br.storage.local, "_rename"),
    (tikv_br.storage.local, "_link"),
    (LocalObjectStore, "delete"),
    (PdClient, "update_service_safe_point"),
    (PdHttp, "pause_scheduler"),
    (ColumnWriter, "put"),
    (StoreClient, "download"),
    (StoreClient, "ingest"),
    (StoreClient, "switch_mode"),
    (StoreClient, "set_download_speed_limit"),
)
"""Call of a local storage that completes a file: a death before it leaves a half-written one."""
EVERY = 1 if os.environ.get(FULL) else 17
"""Distance of the tested moments: an odd number, so that some are before a change and some after one."""


class Fuse:
    """Counts moments, right before and right after each change, over all threads; acts at one of them."""

    def __init__(self, moment: int, act: Callable[[], object]) -> None:
        self._left = moment
        self._act = act
        self._lock = threading.Lock()

    def watch(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Put moments around a change."""

        def changed(*args: object, **named: object) -> object:
            self._tick()
            done = change(*args, **named)
            self._tick()
            return done

        return changed

    def _tick(self) -> None:
        with self._lock:
            self._left -= 1
            now = self._left == -1
        if now:
            self._act()


def with_fuse(operation: Callable[[], int], moment: int, act: Callable[[], object]) -> int:
    """Run an operation, and act at a moment."""
    fuse = Fuse(moment, act)
    with ExitStack() as stack:
        for owner, name in SEAMS:
            stack.enter_context(mock.patch.object(owner, name, fuse.watch(getattr(owner, name))))
        return operation()


def killed_at(operation: Callable[[], int], moment: int, number: int = signal.SIGKILL) -> int:
    """Run an operation that is killed at a moment; its exit code if it has ended before. For a fork."""
    return with_fuse(operation, moment, lambda: os.kill(os.getpid(), number))


def moments(forks: Forks, operation: Callable[[int], Callable[[], int]]) -> Iterator[int]:
    """Kill the operation at moment after moment, until it has come to its end; the number of each try."""
    for number in itertools.count():
        forks.start(partial(killed_at, operation(number), number * EVERY))
        code = forks.wait()
        yield number
        if code != -signal.SIGKILL:
            assert code == 0
            return
