"""Output of plans and summaries of backups and restores, and their figures for reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import asdict

from tikv_br.cli.output import Output, human_bytes, human_seconds, listed
from tikv_br.cluster.timestamps import show_ts
from tikv_br.formats.keys.text import HEX_MARK
from tikv_br.report.facts import counted

if TYPE_CHECKING:
    from tikv_br.compare.files import FilePart
    from tikv_br.dataflow.plan import Interval
    from tikv_br.dataflow.run import BackupReport, BackupSummary
    from tikv_br.point_in_time import PointSummary
    from tikv_br.restore.plan import RestorePlan, RestoreRange
    from tikv_br.restore.run import RestoreSummary

PLAN_ROWS = 20
"""Intervals or parts of a plan that people are shown; JSON has them all."""


def show_backup(out: Output, report: BackupReport) -> None:
    """Write the summary, and before it the plan of a dry run."""
    summary = report.summary
    text = listed(f"{summary.key_mode.title()} backup success summary", backup_figures(summary))
    if summary.dry_run:
        _show_backup_plan(out, report.plan)
        text = f"Nothing was written (dry run); engine {summary.engine} ({summary.engine_reason})"
    out.result("summary", asdict(summary), text)


def _show_backup_plan(out: Output, plan: list[Interval]) -> None:
    intervals = [
        {"start": part.span.start.hex(), "end": part.span.end.hex(), "bytes": part.size, "regions": part.regions}
        for part in plan
    ]
    total, regions = sum(part.size for part in plan), sum(part.regions for part in plan)
    out.result("plan", {"tasks": len(plan), "regions": regions, "approximate_bytes": total, "intervals": intervals})
    rows = [
        (_show_bound(part.span.start), _show_bound(part.span.end), _about(part.size, part.regions), f"{part.regions}")
        for part in plan[:PLAN_ROWS]
    ]
    out.table(
        ("start", "end", "about", "regions"),
        rows,
        title=f"{counted(len(plan), 'task')} over {counted(regions, 'region')}",
    )


def _show_bound(key: bytes) -> str:
    return f"{HEX_MARK}{key.hex()}" if key else "-"


def _about(size: int, regions: int) -> str:
    """A size as PD knows it: in MiB, at least one for each region."""
    return f"{'at most ' if size <= regions << 20 else ''}{human_bytes(size)}"


def backup_figures(summary: BackupSummary, *, age: bool = True) -> list[tuple[str, str]]:
    """Return the figures of the summary, with the Go tool's names if it has them; for a dry run, the figures of the plan."""
    from tikv_br.backupset.coverage import shown_keyspaces

    if summary.dry_run:
        return [("total-ranges", _ranges(summary)), ("engine", f"{summary.engine} ({summary.engine_reason})")]
    return [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("backup-data-size", human_bytes(summary.backup_size)),
        ("total-ranges", _ranges(summary)),
        ("files", f"{summary.files:,}"),
        (
            "backup-ts",
            show_ts(summary.backup_ts, age=age) if summary.backup_ts else "none (the cluster has no timestamps)",
        ),
        ("engine", f"{summary.engine} ({summary.engine_reason})"),
        ("executor", f"{summary.executor} ({summary.executor_reason})"),
        ("api-version", f"{summary.api_version} -> {summary.dst_api_version}"),
        ("keyspaces", shown_keyspaces(summary.keyspaces, summary.keyspace_names)),
        ("lost", _lost(summary)),
        ("checksum", f"{summary.crc64xor:016x}{_compared(summary)}"),
        ("storage", summary.storage),
    ]


def _lost(summary: BackupSummary) -> str:
    """Return the counts of what the conversion dropped; empty if nothing."""
    counts = ((summary.dropped_ttls, "expiries"), (summary.dropped_tombstones, "tombstones"))
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _compared(summary: BackupSummary) -> str:
    """Return the number of ranges compared with the cluster; empty if the backup did not compare."""
    if not summary.compared_ranges + summary.changed_ranges:
        return ""
    changed = f"; {summary.changed_ranges:,} changed while the backup ran and could not be compared"
    return f" ({summary.compared_ranges:,} ranges compared with the cluster{changed if summary.changed_ranges else ''})"


def _ranges(summary: BackupSummary) -> str:
    earlier = f" ({summary.resumed_ranges:,} by an earlier run)" if summary.resumed_ranges else ""
    return f"{summary.ranges:,}{earlier}"


def show_restore(out: Output, summary: RestoreSummary) -> None:
    """Write the summary of a restore, or of its dry run."""
    title = f"{summary.key_mode.title()} restore {'plan (dry run)' if summary.dry_run else 'success summary'}"
    out.result("summary", asdict(summary), listed(title, restore_figures(summary)))


def point_figures(done: PointSummary, *, age: bool) -> list[tuple[str, str]]:
    """The time that was restored, for people; its `age` only for those who read it now."""
    return [("restore-ts", show_ts(done.ts, age=age)), ("uncertainty", done.uncertainty)]


def show_point(out: Output, done: PointSummary) -> None:
    """Show what was merged, and the time window; for a dry run, the whole plan."""
    first, last = done.window
    fields: dict[str, object] = {
        "restore_ts": done.ts,
        "uncertainty": done.uncertainty,
        "window_start": first,
        "window_end": last,
    }
    fields |= {"sources": list(done.sources), "merge": None if done.merged is None else asdict(done.merged.summary)}
    lines = [
        *point_figures(done, age=True),
        ("window", f"{show_ts(first)} to {show_ts(last)}"),
        *(("reads", each) for each in done.sources),
    ]
    out.result("point", fields, listed("Point in time", lines), decoration=done.restored is not None)


def show_restore_plan(out: Output, plan: RestorePlan) -> None:
    """The plan in full for machines, its beginning for people."""
    files = [
        {"name": file.name, **_span(part), "total_kvs": file.total_kvs, "size": file.size}
        for part in plan.parts
        for file in part.files
    ]
    out.result(
        "plan",
        {
            "ranges": [_span(each) for each in plan.wanted],
            "files": files,
            "resumed_files": plan.resumed,
            "splits": [key.hex() for key in plan.splits],
            "regions": plan.regions,
            "total_kvs": plan.total_kvs,
            "total_bytes": plan.total_bytes,
            "size": plan.size,
        },
    )
    rows = [
        (file.name, _show_bound(part.target.start), _show_bound(part.target.end), human_bytes(file.size))
        for part in plan.parts[:PLAN_ROWS]
        for file in part.files
    ]
    regions, splits = counted(plan.regions, "region"), counted(len(plan.splits), "split")
    title = f"{counted(len(files), 'file')} into {regions}, after {splits}"
    out.table(("file", "from", "to", "stored"), rows, title=title)


def _span(each: FilePart | RestoreRange) -> dict[str, str]:
    return {
        "start": each.span.start.hex(),
        "end": each.span.end.hex(),
        "target_start": each.target.start.hex(),
        "target_end": each.target.end.hex(),
    }


def _restored_keyspaces(summary: RestoreSummary) -> str:
    """Keyspaces of the target, and those of the backup if they are called otherwise."""
    from tikv_br.backupset.coverage import shown_keyspaces

    target = shown_keyspaces(summary.target_keyspaces, summary.target_keyspace_names)
    source = shown_keyspaces(summary.keyspaces, summary.keyspace_names)
    return f"{source} -> {target}" if source not in {"", target} else target


def restore_figures(summary: RestoreSummary, *, age: bool = True) -> list[tuple[str, str]]:
    """Return the figures of the summary, with the Go tool's names if it has them."""
    resumed = f" ({summary.resumed_files:,} by an earlier run)" if summary.resumed_files else ""
    saved = (f"{name} {human_seconds(seconds)}" for name, seconds in summary.overlap_seconds.items())
    others = f"{summary.other_kvs:,} other rows in the range were left alone" if summary.other_kvs else ""
    if others and summary.key_mode == "txn":
        others += ": the range is no snapshot"
    return [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("restore-data-size", human_bytes(summary.backup_size)),
        ("files", f"{summary.files:,}{resumed}"),
        ("api-version", summary.dst_api_version),
        ("keyspaces", _restored_keyspaces(summary)),
        ("checksum", f"{summary.crc64xor:016x} {'equal' if summary.verified else 'not compared'}"),
        ("other-rows", others),
        ("overlap", ", ".join(saved)),
        ("new-timestamp", show_ts(summary.restamp_ts, age=age) if summary.restamp_ts else ""),
        ("expired", f"{summary.expired_kvs:,} rows skipped" if summary.expired_kvs else ""),
        ("storage", summary.storage),
    ]
