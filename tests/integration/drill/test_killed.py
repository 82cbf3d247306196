"""An interrupted drill leaves nothing for good: its creations are removed at once, or by the next drill after a kill."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.integration.backup.data import when
from tests.integration.drill.conftest import assert_nothing_left
from tests.integration.drill.killing import killed_at, killed_within
from tests.support.forks import Forks
from tikv_br.drill.history import read_past_drills
from tikv_br.drill.ledger import read_ledgers
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.run import drill, drill_steps
from tikv_br.errors import Terminated
from tikv_br.progress_events import StepStarted
from tikv_br.report.facts import DrillVerdict
from tikv_br.storage.open import open_store


@pytest.mark.parametrize("scenario", [Scenario.LOST_CLUSTER, Scenario.CORRUPT_BACKUP])
def test_the_next_drill_removes_the_creations_of_a_killed_one(
    options: DrillOptions, forks: Forks, scenario: Scenario
) -> None:
    """Drills are killed at the start of every step; each removes the remains of the one before, the last all."""
    drill(options)
    options = replace(options, backup=None, scenario=scenario)
    names = [step.name for step in drill_steps(options)]
    made = 2  # the first two steps only look
    for number, name in enumerate(names):
        forks.start(partial(killed_at, options, name))
        assert forks.wait() == -signal.SIGKILL, name
        assert len(read_ledgers(open_store(options.home))) == (number > made), name
    assert drill(options).verdict is DrillVerdict.PASSED
    assert_nothing_left(options)


def test_a_drill_that_is_told_to_end_cleans_up_and_says_so(options: DrillOptions) -> None:
    """SIGTERM in the middle: the playground goes at once, and the report says that nothing was proven."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        drill(options, when(StepStarted, "verify", end))
    assert_nothing_left(options)
    assert [past.verdict for past in read_past_drills(open_store(options.home))] == ["interrupted"]


def test_old_drills_go_with_the_backups_that_they_made(options: DrillOptions) -> None:
    """Of three drills that made a backup two stay, with their backups; a foreign backup would not be touched."""
    ids = [drill(replace(options, keep_last=2)).id for _ in range(3)]
    assert [past.id for past in read_past_drills(open_store(options.home))] == ids[1:]
    names = {info.name.partition("/")[0] for info in open_store(options.backups).list()}
    assert names == {f"drill-{ids[1]}", f"drill-{ids[2]}", "tikv-br-index"}


def test_a_backup_that_a_killed_drill_began_is_removed(options: DrillOptions, forks: Forks) -> None:
    """Killed when the backup has files and no end: the next drill removes them with their folder, and its own backup is the only one."""
    step = "commit"
    forks.start(partial(killed_within, options, step))
    assert forks.wait() == -signal.SIGKILL
    report = drill(options)
    assert_nothing_left(options)
    names = {path.name for path in Path(options.backups.path).iterdir()}
    assert names == {f"drill-{report.id}", "tikv-br-index"}


def test_a_backup_that_a_killed_drill_finished_goes_as_those_of_others_do(options: DrillOptions, forks: Forks) -> None:
    """Killed after its backup, the drill is reported as interrupted, with its backup; --keep-last removes both."""
    forks.start(partial(killed_at, options, "prepare the target"))
    assert forks.wait() == -signal.SIGKILL
    first = drill(options)
    killed, _ = read_past_drills(open_store(options.home))
    assert (killed.verdict, bool(killed.made_backup)) == ("interrupted", True)
    names = {info.name.partition("/")[0] for info in open_store(options.backups).list()}
    assert names == {f"drill-{killed.id}", f"drill-{first.id}", "tikv-br-index"}
    last = drill(replace(options, keep_last=1))
    assert [past.id for past in read_past_drills(open_store(options.home))] == [last.id]
    names = {info.name.partition("/")[0] for info in open_store(options.backups).list()}
    assert names == {f"drill-{last.id}", "tikv-br-index"}
    assert_nothing_left(options)
