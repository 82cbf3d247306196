from __future__ import annotations

from tests.support.clock import Clock
from tikv_br.progress_events import Event, StepFinished, StepStarted, TasksProgress
from tikv_br.report.recorder import MAX_SAMPLES, Phase, Recorder


def test_steps_are_counted_through_and_those_within_are_kept_apart() -> None:
    """The listener sees the drill's own steps, numbered over all lists; the record has the operations' as well."""
    clock, heard = Clock(100.0), list[Event]()
    recorder = Recorder(heard.append, 3, clock)
    recorder(StepStarted("restore", 1, 1))
    clock.now += 1
    recorder.nested(StepStarted("ingest", 4, 9))
    clock.now += 2
    recorder.nested(StepFinished("ingest", 4, 9, 2.0))
    recorder(StepFinished("restore", 1, 1, 3.0))
    recorder(StepStarted("report", 1, 2))
    recorder.failed()
    assert heard == [StepStarted("restore", 1, 3), StepFinished("restore", 1, 3, 3.0), StepStarted("report", 2, 3)]
    assert recorder.phases == [
        Phase("ingest", "restore", 1.0, 2.0),
        Phase("restore", "", 0.0, 3.0),
        Phase("report", "", 3.0, 0.0, ended_well=False),
    ]


def test_a_failure_within_a_step_fails_the_step() -> None:
    """Both are recorded as interrupted, and nothing is running any more."""
    recorder = Recorder(clock=Clock(100.0))
    recorder(StepStarted("restore", 1, 1))
    recorder.nested(StepStarted("ingest", 1, 1))
    recorder.failed()
    assert [(phase.name, phase.ended_well) for phase in recorder.phases] == [("ingest", False), ("restore", False)]
    assert recorder.step == ""


def test_samples_of_a_long_drill_are_thinned_out() -> None:
    """First and last stay, in order, however many there were."""
    clock = Clock(100.0)
    recorder = Recorder(clock=clock)
    for number in range(10 * MAX_SAMPLES):
        clock.now += 1
        recorder.nested(TasksProgress(0, 1, number, number, 0.0, 0.0))
    places = [sample.keys for sample in recorder.samples]
    assert len(places) <= MAX_SAMPLES
    assert places == sorted(set(places))
    assert (places[0], places[-1]) == (0, 10 * MAX_SAMPLES - 1)
