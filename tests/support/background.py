"""What a test has going on while it looks at something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class Background:
    """Threads that run from the beginning of a block to its end; what one of them raises, the block's end raises."""

    def __init__(self, steps: Iterable[tuple[Callable[[], object], float]] = ()) -> None:
        """What to do again and again, each on a thread of its own, and how many seconds to wait before each time."""
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
                exc.add_note(f"meanwhile in the background: {error!r}")

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        """Have a thread for work that ends by itself once `_enough` is set."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - it is raised where the block ends
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, name=work.__name__))

    def _repeat(self, step: Callable[[], object], pause: float) -> None:
        while not self._enough.wait(pause):
            step()
