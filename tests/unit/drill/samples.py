"""Reports as drills write them, made without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tikv_br.cluster.timestamps import compose
from tikv_br.drill.history import past_drill_of
from tikv_br.drill.objectives import Measured, Objectives, judge
from tikv_br.drill.report import DrillReport
from tikv_br.report.facts import BackupFacts, Cell, Compared, DrillVerdict, ReportedError
from tikv_br.report.recorder import Phase, Sample

BEGUN_MS = 1_790_000_000_000
DAY_MS = 86_400_000


def passed(number: int = 1) -> DrillReport:
    """The report of the ``number``-th daily drill, with a trend of the ones before."""
    report = DrillReport(
        id=f"20260921T{number:06d}-abcdef",
        verdict=DrillVerdict.PASSED,
        scenario="lost-cluster",
        target="an embedded playground of 3 stores",
        started_ms=BEGUN_MS + number * DAY_MS,
        seconds=100.0,
        tool_version="0.1",
        goals=judge(
            Objectives(rpo=120, rto=60, min_keys=900),
            Measured(rpo=65.5, rpo_method="By backup-ts.", rto=30.0 + number, age=70.0, keys=1000),
        ),
        backup=BackupFacts(
            "0123456789abcdef",
            "local:///backups/a",
            True,
            7,
            "store",
            "v2",
            compose(BEGUN_MS - 300_000),
            BEGUN_MS,
            1000,
            96_000,
            50_000,
            3,
        ),
        trouble=None,
        phases=(
            Phase("back up", "", 0.0, 40.0),
            Phase("copy", "back up", 5.0, 30.0),
            Phase("restore", "", 40.0, 30.0),
            Phase("verify", "", 70.0, 20.0),
        ),
        samples=tuple(Sample(40.0 + at, "restore", 100 * at, 9600 * at) for at in range(11)),
        keyspace_map=(Cell("", "61", 500, 40_000, regions=1), Cell("61", "62", 500, 56_000, regions=2)),
        compared=(Compared("the target with the backup", "range by range", 1000, 0),),
        notices=("a note <b>that is no markup</b>",),
        remains=(),
        trend=(),
        source="10.0.0.1:2379",
    )
    earlier = tuple(past_drill_of(passed(before).to_json()) for before in range(1, number)) if number <= 5 else ()
    return replace(report, trend=(*earlier[-4:], past_drill_of(report.to_json())))


def failed() -> DrillReport:
    """The report of a drill whose restore was refused."""
    report = passed()
    return replace(
        report,
        verdict=DrillVerdict.FAILED,
        goals=judge(Objectives(rto=60), Measured(rpo=65.5, rpo_method="By backup-ts.")),
        trouble=ReportedError("BackupDamaged", 32, "sst/1.sst is not what was written", "Use another copy.", "restore"),
        phases=(*report.phases[:2], Phase("restore", "", 40.0, 3.0, ended_well=False)),
        samples=(),
        compared=(),
    )


class NoHost:
    """Runs no playground, and notes which are stopped."""

    def __init__(self) -> None:
        self.stopped: list[Path] = []

    def start_detached(self, folder: Path, api_version: object, stores: int) -> str:
        """Nothing starts here."""
        raise AssertionError

    def stop(self, folder: Path) -> None:
        """Note it."""
        self.stopped.append(folder)
