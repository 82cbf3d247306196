"""``tikv-br drill``: run, list, show and schedule recovery drills.

Flags of ``tikv-br drill run``, and the options that they become.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.backup_cmd import DST_API_VERSION, KEYSPACES, SAFE_INTERVAL
from tikv_br.cli.command import REQUIRED, Flags, argument, command, flag
from tikv_br.cli.key_flags import LogSourceFlags, parse_ts_or_latest
from tikv_br.cli.output import human_bytes, human_seconds, listed
from tikv_br.cli.progress import progress_display
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import BackupDamaged, UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.dataflow.options import BackupOptions
    from tikv_br.drill.history import PastDrill
    from tikv_br.drill.ledger import EntryKind, Remover
    from tikv_br.drill.options import PointChoice, TailOptions
    from tikv_br.drill.report import Summary
    from tikv_br.drill.targets import DrillTarget
    from tikv_br.report.hooks import Hooks
    from tikv_br.storage.url import StorageLocation


REPORTS = partial(
    flag,
    "",
    "Directory or URL for reports, and for the records by which interrupted drills are cleaned up.",
    shared=True,
    metavar="URL",
    show_default="~/.local/state/tikv-br/drills",
)


class RehearsedBackupFlags(Flags):
    backup: str = flag(
        "new",
        "Backup to restore: make a new one of --pd, use the newest of --storage, or the one at a URL.",
        metavar="new|newest|URL",
    )
    keyspaces: list[str] | None = KEYSPACES()
    dst_api_version: Literal["v1", "v1ttl", "v2"] | None = DST_API_VERSION()
    safe_interval: float = SAFE_INTERVAL()
    spark: shared.SparkFlags

    def new(self, cluster: ClusterConfig, place: StorageLocation) -> BackupOptions | None:
        """Return the options of a new backup, or None to use an existing one.

        Raises `UsageError` for flags without effect.
        """
        if self.backup != "new":
            if self.keyspaces or self.dst_api_version:
                raise UsageError("--keyspace and --dst-api-version need --backup new")
            return None
        from tikv_br.dataflow.options import BackupOptions
        from tikv_br.formats.api_version import ApiVersion

        return self.fill(
            BackupOptions,
            cluster=cluster,
            storage=place,
            keyspaces=tuple(self.keyspaces or ()),
            dst_api_version=ApiVersion.from_label(self.dst_api_version) if self.dst_api_version else None,
        )

    @property
    def url(self) -> str:
        """The URL of a named backup; ``""`` = none."""
        return "" if self.backup in {"new", "newest"} else self.backup


class DrillTargetFlags(Flags):
    target: Literal["playground", "cluster"] | None = flag(
        None,
        "Kind of target: a playground (emulator of PD and TiKV) started for the drill, or an empty cluster or keyspace.",
        show_default="playground, unless --target-pd or --target-keyspace is given",
    )
    target_pd: str = flag(
        "",
        "PD endpoints of an empty target cluster; its data is deleted after the drill (default with --target-keyspace: --pd).",
        metavar="HOST:PORT[,…]",
    )
    target_ca: str | None = flag(
        None, "CA certificate for --target-pd (PEM; default: --ca; empty: no TLS).", metavar="FILE"
    )
    target_cert: str | None = flag(None, "Client certificate for --target-pd (PEM; default: --cert).", metavar="FILE")
    target_key: str | None = flag(None, "Private key of --target-cert (PEM; default: --key).", metavar="FILE")
    target_keyspace: str = flag(
        "", "Empty target keyspace (API V2); its data is deleted after the drill.", metavar="ID|NAME"
    )
    target_prefix: str = flag("", "")
    target_stores: int = flag(3, "Number of stores of the playground.", limits=(1, 100))
    work_dir: str = flag(
        "", "Directory for the playground's data.", metavar="DIR", show_default="the system's temporary directory"
    )

    def choose(self, source: shared.ClusterFlags) -> tuple[DrillTarget, dict[EntryKind, Remover]]:
        """The target, and how to remove playgrounds of earlier drills. Raises `UsageError`."""
        from tikv_br.drill.ledger import EntryKind
        from tikv_br.drill.playground import PlaygroundTarget
        from tikv_br.drill.targets import ClusterTarget
        from tikv_br.playground import launcher

        uses_cluster = self._uses_cluster()
        parent = Path(self.work_dir) if self.work_dir else Path(tempfile.gettempdir()) / f"tikv-br-drills-{os.getuid()}"
        playground = PlaygroundTarget(launcher, parent, self.target_stores)
        removers: dict[EntryKind, Remover] = {EntryKind.PLAYGROUND: playground}
        if not uses_cluster:
            return playground, removers
        tls = (self.target_ca, self.target_cert, self.target_key)
        cluster = source.other(self.target_pd, *tls) if self.target_pd else source.config()
        return ClusterTarget(cluster, self.target_keyspace), removers

    def _uses_cluster(self) -> bool:
        if self.target_prefix:
            raise UsageError(
                "--target-prefix was removed: rows that other clients write to the same keyspace could be deleted with the rows of a drill",
                hint="Use --target-keyspace with an empty keyspace, --target-pd with an empty cluster, or a playground.",
            )
        named = bool(self.target_pd or self.target_keyspace)
        if self.target == "playground" and named:
            raise UsageError("--target playground cannot be combined with --target-pd or --target-keyspace")
        if self.target == "cluster" and not named:
            raise UsageError("--target cluster needs --target-pd or --target-keyspace")
        tls = (self.target_ca, self.target_cert, self.target_key)
        if any(each is not None for each in tls) and not self.target_pd:
            raise UsageError("--target-ca, --target-cert and --target-key need --target-pd")
        return named


class DrillPointFlags(Flags):
    """The time that --scenario point-in-time restores."""

    source: LogSourceFlags
    within: float = flag(
        "6h", "Choose a random time at most this long before the newest restorable time.", kind=kinds.TIME
    )
    until: str = flag(
        "",
        "Restore this time: latest, a PD timestamp, a time or an age (default: a random one).",
        "--until",
        "--restore-ts",
        metavar="TS|TIME|latest",
    )
    compare_source: bool = flag(
        False,
        "Also compare with all rows of --pd: a key may differ only if the log has a later change of it. `log start` must be running.",
    )

    def choice(self, storage: backup_flags.StorageFlags) -> PointChoice | None:
        """None without a log. Raises `UsageError`."""
        log = self.source.source(storage)
        if log is None:
            if self.until or self.compare_source:
                raise UsageError("--until and --compare-source need --log and --scenario point-in-time")
            return None
        from tikv_br.drill.options import PointChoice

        ts = parse_ts_or_latest(self.until, "--until") if self.until else None
        return PointChoice(log, ts, self.within, self.compare_source)


class TailFlags(Flags):
    tail: float | None = flag(
        None,
        "Replicate from the source to the target for this long after the restore, then rehearse the cut-over.",
        kind=kinds.TIME,
    )
    tail_lag: float = flag("10s", "Start the cut-over when the target's lag is at most this.", kind=kinds.TIME)
    tail_patience: float = flag(
        "5m",
        "Maximum time to wait until the lag is at most --tail-lag, and then until the last write has arrived.",
        kind=kinds.TIME,
    )
    canary: str = flag("", "")

    def options(self) -> TailOptions | None:
        """None = the source is not followed. Raises `UsageError`."""
        if self.canary:
            raise UsageError(
                "--canary was removed: drills do not write to the source any more",
                hint="Omit it. --tail measures the cut-over by timestamps of the source.",
            )
        if self.tail is None:
            return None
        from tikv_br.drill.options import TailOptions

        return TailOptions(self.tail, self.tail_lag, self.tail_patience)


class GoalFlags(Flags):
    rpo: float | None = flag(
        None, "Objective: maximum data loss, as time (RPO). Exceeding it fails the drill.", kind=kinds.TIME
    )
    rto: float | None = flag(
        None, "Objective: maximum time until data is restored and verified (RTO).", kind=kinds.TIME
    )
    max_age: float | None = flag(None, "Objective: maximum age of the backup.", kind=kinds.TIME)
    min_keys: int | None = flag(
        None, "Objective: minimum number of keys after the restore.", limits=(0, kinds.MAX_COUNT)
    )
    cut_over: float | None = flag(
        None,
        "Objective: maximum time from the last write to the verified target during the cut-over (with --tail).",
        kind=kinds.TIME,
    )


class DrillHookFlags(shared.HookFlags):
    webhook_url: str = flag("", "URL to POST the verdict and figures of each drill to, as JSON.", metavar="URL")
    webhook_url_file: str = flag("", "File with the URL for --webhook-url.", metavar="FILE")
    on_end: str = flag(
        "", "Command to run after each drill, with TIKV_BR_DRILL_* in its environment.", metavar="COMMAND"
    )

    def hooks(self) -> Hooks:
        """The hooks. Raises `UsageError`."""
        webhook = shared.secret_of("--webhook-url", self.webhook_url, self.webhook_url_file)
        return replace(super().hooks(), webhook=webhook, command=shared.words_of("--on-end", self.on_end))

    def around(self, path: str, flags: Flags) -> AbstractContextManager[None]:
        """Nothing: a drill runs its hooks itself, with its figures and before it writes its report."""
        del path, flags
        return nullcontext()


class DrillFlags(backup_flags.BackupFlags):
    storage: str = backup_flags.storage(backup_flags.MANY_BACKUPS)
    backup: RehearsedBackupFlags
    scenario: Literal["lost-cluster", "deleted-range", "corrupt-backup", "stale-safe-point", "point-in-time"] = flag(
        "lost-cluster",
        "Incident to rehearse: lost-cluster restores everything, deleted-range the keys from --start to --end, point-in-time the "
        "rows of a past time, with --log; corrupt-backup and stale-safe-point must be detected.",
    )
    range: key_flags.RangeFlags
    seed: int | None = flag(
        None,
        "Seed for choosing the byte that --scenario corrupt-backup changes, or the time that point-in-time restores to.",
        limits=(0, kinds.MAX_SEED),
        show_default="0 for corrupt-backup, random for point-in-time",
    )
    point: DrillPointFlags
    goals: GoalFlags
    reports: str = REPORTS()
    keep_last: int = flag(
        0,
        "Keep the reports of the newest N drills and the backups they made, and remove older ones (0 = keep all).",
        limits=(0, kinds.MAX_BACKUPS),
    )
    target: DrillTargetFlags
    tail: TailFlags
    drill_hooks: DrillHookFlags
    cluster: shared.ClusterFlags


log = logging.getLogger(__name__)
COLUMNS = ("id", "started", "verdict", "scenario", "RTO", "RPO", "keys", "size")


@command("drill run", example="--pd 10.0.0.1:2379 --storage s3://backups --backup newest --rto 30m")
def run(flags: DrillFlags) -> None:
    """Run a drill. Back up, restore into an empty target, verify, measure, clean up and report."""
    span = flags.range.key_range()
    backups = flags.location
    from tikv_br.drill.objectives import Objectives
    from tikv_br.drill.options import DrillOptions, Scenario
    from tikv_br.drill.report import page_url, summarize
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
    from tikv_br.drill.history import NOT_A_REPORT, REPORTS, find_report
    from tikv_br.drill.report import page_url
    from tikv_br.storage.open import open_store

    out, home = flags.out, open_store(flags.s3.locate(_reports_url(flags.reports)))
    report = find_report(home, flags.drill_id)
    rows = []
    try:
        text = _report_text(report, page_url(home.location, report["id"]))
        for goal in report["goals"]:
            limit, value = (_figure(goal[name], goal["unit"]) for name in ("limit", "value"))
            met = "" if goal["limit"] is None else "met" if goal["met"] else "missed"
            rows.append((str(goal["name"]), limit, value, met))
    except NOT_A_REPORT as error:
        raise BackupDamaged(
            f"{REPORTS}/{report['id']}.json in {home.location} is not a report of a version that can be read: {error}"
        ) from None
    out.result("report", {"report": report}, text)
    out.table(("objective", "limit", "measured", ""), rows, prose=("objective",))


class DrillScheduleFlags(shared.ScheduleFlags):
    file: Path = flag(REQUIRED, "Config file of the drill.", "--for", metavar="FILE")


@command("drill schedule", example="--print crontab --for /etc/tikv-br/drill.toml --at 04:00")
def schedule(flags: DrillScheduleFlags) -> None:
    """Print a crontab line or systemd units that run drills."""
    if not flags.file.is_file():
        log.warning("%s does not exist: drills fail until it does", flags.file)
    text = flags.text("drill run", ["--config", str(flags.file.absolute())])
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
