"""Drills that are killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from unittest import mock

from tests.integration.backup.data import when
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.run import drill
from tikv_br.playground import launcher
from tikv_br.progress_events import Event, StepStarted
from tikv_br.report.recorder import Recorder


class Host:
    """The launcher of playgrounds, as an object that pickles: a module does not."""

    start_detached = staticmethod(launcher.start_detached)
    stop = staticmethod(launcher.stop)


def killed_at(options: DrillOptions, step: str) -> int:
    """Run a drill that dies when a step begins; 0 = it did not come to that."""
    drill(options, when(StepStarted, step, partial(os.kill, os.getpid(), signal.SIGKILL)))
    return 0


def killed_within(options: DrillOptions, step: str) -> int:
    """Run a drill that dies when a step of its backup, or of its restore, begins."""
    inside = Recorder.nested

    def die(recorder: Recorder, event: Event) -> None:
        if isinstance(event, StepStarted) and event.name == step:
            os.kill(os.getpid(), signal.SIGKILL)
        inside(recorder, event)

    with mock.patch.object(Recorder, "nested", die):
        drill(options)
    return 0
