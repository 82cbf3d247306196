"""Background activity of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class Background:
    """Threads that run from the beginning of a block to its end; what one of them raises, the block's end raises."""

    def __init__(self, steps: Iterable[tuple[Callable[[], object], float]] = ()) -> None:
        """Repeat each step on a thread of its own; its second item is the pause before each time, in seconds."""
        self._enough = threading.Event()
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        for step, pause in steps:
            self._spawn(self._repeat, step, pause)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()
        if exc is None and self._errors:
            raise self._errors[0]
        if exc is not None:  # it may be what follows from theirs
            for error in self._errors:
                exc.add_note(f"also in the background: {error!r}")

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        """Start a thread for work that ends once `_enough` is set."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - it is raised where the block ends
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, name=work.__name__))

    def _repeat(self, step: Callable[[], object], pause: float) -> None:
        while not self._enough.wait(pause):
            step()
