"""``tikv-br drill``: recoveries rehearsed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tikv_br.cli import drill_options as flags
from tikv_br.cli import options
from tikv_br.cli.drill_places import BackupFlags, TargetFlags
from tikv_br.cli.drill_tail import TailFlags
from tikv_br.cli.keys import read_range
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import KeyForm, OutputForm, OutputOption
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.storage_flags import S3Flags, StorageFlags
from tikv_br.cli.storage_session import RootOption, utc
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import BackupDamaged, BackupNotFound, UsageError

if TYPE_CHECKING:
    from tikv_br.drill.history import Past
    from tikv_br.drill.notify import Summary
    from tikv_br.storage.url import StorageLocation

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)
log = logging.getLogger(__name__)
COLUMNS = ("id", "begun (UTC)", "verdict", "scenario", "RTO", "RPO", "keys", "size")


@app.callback()
def drill() -> None:
    """Rehearse a recovery, prove that it works, and report."""


@app.command("run")
@grouped
def run(
    *,
    storage: RootOption,
    backup_flags: BackupFlags,
    scenario: flags.ScenarioOption = "lost-cluster",
    start: options.StartOption = "",
    end: options.EndOption = "",
    key_form: options.FormatOption = KeyForm.HEX,
    seed: flags.SeedOption = 0,
    goals: flags.GoalFlags,
    reports: flags.ReportsOption = "",
    keep_last: flags.KeepLastOption = 0,
    target_flags: TargetFlags,
    tail_flags: TailFlags,
    hooks: flags.HookFlags,
    cluster: ClusterFlags,
    storage_flags: StorageFlags,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Back up, restore into a place that nobody uses, verify, measure and report; then remove all but the backup."""
    first, last = read_range(start, end, key_form)
    place = storage_flags.locate(storage)
    from tikv_br.drill.notify import summarize
    from tikv_br.drill.options import DrillOptions, Scenario
    from tikv_br.drill.report import page_url
    from tikv_br.drill.run import drill as rehearse

    source = cluster.config()
    target, removers = target_flags.choose(cluster, key_form)
    asked = DrillOptions(
        backups=place,
        home=storage_flags.locate(flags.reports_url(reports)),
        target=target,
        backup=backup_flags.new(source, place),
        existing=storage_flags.locate(backup_flags.named) if backup_flags.named else None,
        locate=storage_flags.locate,
        removers={**removers, **tail_flags.removers(source)},
        source=source,
        tail=tail_flags.options(source, key_form),
        scenario=Scenario(scenario),
        objectives=goals.objectives(),
        start=first,
        end=last,
        seed=seed,
        keep_last=keep_last,
        hooks=hooks.hooks(),
    )
    out = Output(output)
    with progress_display(out) as display:
        report = rehearse(asked, display)
    summary = summarize(report, page_url(asked.home, report.id))
    out.result("summary", asdict(summary), _text(summary))


@app.command("list")
@grouped
def list_drills(
    *, reports: flags.ReportsOption = "", storage_flags: S3Flags, output: OutputOption = OutputForm.CONSOLE
) -> None:
    """List the drills that have a report, the newest first."""
    from tikv_br.report.figures import counted

    out = Output(output)
    place = storage_flags.locate(flags.reports_url(reports))
    found = _newest_first(place)
    for past in found:
        out.result("drill", asdict(past))
    out.table(COLUMNS, [_row(past) for past in found], title=f"{counted(len(found), 'drill')} in {place}")
    out.flush()


@app.command("show")
@grouped
def show(
    *,
    drill_id: Annotated[str, typer.Argument(metavar="ID", help="Of the drill; without it, the newest.")] = "",
    reports: flags.ReportsOption = "",
    storage_flags: S3Flags,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Show the report of a drill."""
    from tikv_br.drill.history import REPORTS, read_past, read_report
    from tikv_br.drill.report import page_url
    from tikv_br.storage.open import open_store

    home = open_store(storage_flags.locate(flags.reports_url(reports)))
    ids = [past.id for past in read_past(home) if past.id.startswith(drill_id)]
    if not ids:
        what = f"no drill {drill_id!r}" if drill_id else "no report of a drill"
        raise BackupNotFound(f"there is {what} in {home.location}", hint="See `tikv-br drill list`, and --reports.")
    if drill_id and len(ids) > 1:
        raise UsageError(f"{drill_id!r} begins the ids of {len(ids)} drills: {', '.join(ids[:4])}")
    report = read_report(home, ids[-1])
    if report is None:
        raise BackupDamaged(
            f"{REPORTS}/{ids[-1]}.json in {home.location} is not as drill {ids[-1]} wrote it",
            hint="Its page, the .html beside it, is another object. See `tikv-br drill list` for other drills.",
        )
    out = Output(output)
    out.result("report", {"report": report}, _story(report, page_url(home.location, ids[-1])))
    rows = [
        (goal["name"], _figure(goal["limit"], goal["unit"]), _figure(goal["value"], goal["unit"]), _met(goal))
        for goal in report["goals"]
    ]
    out.table(("objective", "asked", "measured", ""), rows)
    out.flush()


@app.command("schedule")
def schedule(
    form: Annotated[
        Literal["crontab", "systemd"], typer.Option("--print", help="What to print; nothing is installed.")
    ],
    config: Annotated[Path, typer.Option("--for", metavar="FILE", help="The config file that says what to rehearse.")],
    at: Annotated[str, typer.Option("--at", metavar="HH:MM", help="When, by the machine's clock.")] = "03:30",
    weekday: Annotated[str, typer.Option("--on", metavar="DAY", help="On one day of the week only.")] = "",
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Print what has cron or systemd run a drill."""
    from tikv_br.drill.schedule import crontab, systemd

    if not config.is_file():
        log.warning("there is no file %s: drills will fail until there is", config)
    program = str(Path(sys.argv[0]).absolute())
    command = [program, "drill", "run", "--config", str(config.absolute())]
    text = (crontab if form == "crontab" else systemd)(command, at, weekday)
    Output(output).result("schedule", {"text": text}, text.rstrip("\n"))


def _newest_first(place: StorageLocation) -> list[Past]:
    from tikv_br.drill.history import read_past
    from tikv_br.storage.open import open_store

    return list(reversed(read_past(open_store(place))))


def _text(summary: Summary) -> str:
    figures = [
        ("verdict", summary.verdict),
        ("RTO", _figure(summary.rto, "s")),
        ("RPO", _figure(summary.rpo, "s")),
        *([("cut-over", _figure(summary.cut_over, "s"))] if summary.cut_over is not None else []),
        ("keys", _figure(summary.keys, "keys")),
        ("backup", summary.backup),
        ("total-take", human_seconds(summary.seconds)),
        ("report", summary.page),
    ]
    return _listed(f"Drill {summary.id}", figures)


def _story(report: dict[str, Any], page: str) -> str:
    """What a report says of a drill, but for its objectives."""
    backup, trouble = report["backup"], report["trouble"]
    said = [
        ("verdict", report["verdict"]),
        ("begun (UTC)", f"{utc(report['started_ms'])}, took {human_seconds(report['seconds'])}"),
        ("scenario", f"{report['scenario']}, into {report['target']}"),
        *([("backup", backup["place"])] if backup else []),
        *(
            [("went wrong", f"{trouble['message']} (step “{trouble['step']}”)"), ("hint", trouble["hint"])]
            if trouble
            else []
        ),
        *(("note", note) for note in report["notices"]),
        ("report", page),
    ]
    return _listed(f"Drill {report['id']}", said)


def _listed(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return title + "".join(f"\n  {name:<18} {value}" for name, value in rows)


def _row(past: Past) -> tuple[str, ...]:
    return (
        past.id,
        utc(past.started_ms),
        past.verdict,
        past.scenario,
        _figure(past.rto, "s"),
        _figure(past.rpo, "s"),
        f"{past.keys:,}",
        human_bytes(past.data_bytes),
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return human_seconds(value) if unit == "s" else f"{value:,.0f}"


def _met(goal: dict[str, object]) -> str:
    if goal["limit"] is None:
        return ""
    return "reached" if goal["met"] else "missed"
