"""``tikv-br drill``: run, list, show and schedule recovery drills."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tikv_br.cli import backup_flags, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.drill_flags import REPORTS, DrillFlags
from tikv_br.cli.output import human_bytes, human_seconds, listed
from tikv_br.cli.progress import progress_display
from tikv_br.cluster.timestamps import show_time

if TYPE_CHECKING:
    from tikv_br.drill.history import PastDrill
    from tikv_br.drill.notify import Summary

log = logging.getLogger(__name__)
COLUMNS = ("id", "started", "verdict", "scenario", "RTO", "RPO", "keys", "size")


@command("drill run", example="--pd 10.0.0.1:2379 --storage s3://backups --backup newest --rto 30m")
def run(flags: DrillFlags) -> None:
    """Run a drill. Back up, restore into an empty target, verify, measure, clean up and report."""
    span = flags.range.key_range()
    backups = flags.location
    from tikv_br.drill.notify import summarize
    from tikv_br.drill.objectives import Objectives
    from tikv_br.drill.options import DrillOptions, Scenario
    from tikv_br.drill.report import page_url
    from tikv_br.drill.run import drill as run_drill

    source, locate = flags.cluster.config(), flags.storage_flags.locate
    target, removers = flags.target.choose(flags.cluster)
    options = DrillOptions(
        backups=backups,
        home=locate(_reports_url(flags.reports)),
        target=target,
        backup=flags.backup.new(source, backups),
        existing=locate(flags.backup.url) if flags.backup.url else None,
        removers=removers,
        source=source,
        tail=flags.tail.options(),
        point=flags.point.choice(flags.storage_flags),
        scenario=Scenario(flags.scenario),
        objectives=flags.goals.fill(Objectives),
        span=span,
        seed=flags.seed,
        keep_last=flags.keep_last,
        hooks=flags.drill_hooks.hooks(),
    )
    with progress_display(flags.out) as display:
        flags.range.notice(display)
        report = run_drill(options, display)
    summary = summarize(report, page_url(options.home, report.id))
    flags.out.result("summary", asdict(summary), _text(summary, report.target))


def _reports_url(value: str) -> str:
    return value or str(shared.state_path("drills"))


class ReportsFlags(shared.CommandFlags):
    reports: str = REPORTS()
    s3: backup_flags.S3Flags


@command("drill list", example="--reports s3://backups/drills")
def list_drills(flags: ReportsFlags) -> None:
    """List the drills that have a report, newest first."""
    from tikv_br.drill.history import read_past_drills
    from tikv_br.report.facts import counted
    from tikv_br.storage.open import open_store

    place = flags.s3.locate(_reports_url(flags.reports))
    found = read_past_drills(open_store(place))[::-1]
    for past in found:
        flags.out.result("drill", asdict(past))
    title = f"{counted(len(found), 'drill')} in {place}"
    flags.out.table(COLUMNS, [_row(past) for past in found], title=title, drop=("size", "keys", "scenario"))


class DrillShowFlags(ReportsFlags):
    drill_id: str = argument("", "[ID]", "Drill ID or a unique prefix of it (default: the newest).")


@command("drill show", example="--reports s3://backups/drills")
def show(flags: DrillShowFlags) -> None:
    """Show the report of a drill."""
    from tikv_br.drill.history import find_report
    from tikv_br.drill.report import page_url
    from tikv_br.storage.open import open_store

    out, home = flags.out, open_store(flags.s3.locate(_reports_url(flags.reports)))
    report = find_report(home, flags.drill_id)
    out.result("report", {"report": report}, _report_text(report, page_url(home.location, report["id"])))
    rows = []
    for goal in report["goals"]:
        limit, value = (_figure(goal[name], goal["unit"]) for name in ("limit", "value"))
        rows.append((goal["name"], limit, value, "" if goal["limit"] is None else "met" if goal["met"] else "missed"))
    out.table(("objective", "limit", "measured", ""), rows, prose=("objective",))


class ScheduleFlags(shared.CommandFlags):
    form: Literal["crontab", "systemd"] = flag(REQUIRED, "Format to print. Nothing is installed.", "--print")
    file: Path = flag(REQUIRED, "Config file of the drill.", "--for", metavar="FILE")
    at: str = flag("03:30", "Time of day, in the machine's time zone.", metavar="HH:MM")
    weekday: str = flag(
        "", "Day of the week, as sunday, or of the month, as 1 (default: every day).", "--on", metavar="DAY"
    )


@command("drill schedule", example="--print crontab --for /etc/tikv-br/drill.toml --at 04:00")
def schedule(flags: ScheduleFlags) -> None:
    """Print a crontab line or systemd units that run drills."""
    from tikv_br.drill.schedule import crontab, systemd

    if not flags.file.is_file():
        log.warning("%s does not exist: drills fail until it does", flags.file)
    program = str(Path(sys.argv[0]).absolute())
    words = [program, "drill", "run", "--config", str(flags.file.absolute())]
    text = (crontab if flags.form == "crontab" else systemd)(words, flags.at, flags.weekday)
    flags.out.result("schedule", {"text": text}, text.rstrip("\n"))


def _text(summary: Summary, target: str) -> str:
    from tikv_br.drill.report import against

    figures = [
        ("verdict", summary.verdict),
        ("RTO", _figure(summary.rto, "s")),
        ("RPO", _figure(summary.rpo, "s")),
        ("cut-over", "" if summary.cut_over is None else _figure(summary.cut_over, "s")),
        ("keys", _figure(summary.keys, "keys")),
        ("backup", summary.backup),
        ("total-take", human_seconds(summary.seconds)),
        ("report", summary.page),
    ]
    return listed(f"Drill {summary.id}{against(target)}", figures)


def _report_text(report: dict[str, Any], page: str) -> str:
    """A report without its objectives."""
    from tikv_br.drill.report import against

    trouble = report["trouble"]
    rows = [
        ("verdict", report["verdict"]),
        ("started", f"{show_time(report['started_ms'])}, took {human_seconds(report['seconds'])}"),
        ("scenario", f"{report['scenario']}, target: {report['target']}"),
        ("backup", report["backup"]["place"] if report["backup"] else ""),
        ("failure", f"{trouble['message']} (step “{trouble['step']}”)" if trouble else ""),
        ("hint", trouble["hint"] if trouble else ""),
        *(("note", note) for note in report["notices"]),
        ("report", page),
    ]
    return listed(f"Drill {report['id']}{against(report['target'])}", rows)


def _row(past: PastDrill) -> tuple[str, ...]:
    return (
        past.id,
        show_time(past.started_ms),
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
