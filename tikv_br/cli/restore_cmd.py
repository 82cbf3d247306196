"""``tikv-br restore raw`` and, for short, ``tikv-br restore``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import typer

from tikv_br.cli.keys import read_key, read_range
from tikv_br.cli.lazy import DefaultCommandGroup
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import (
    DryRunOption,
    EndOption,
    ExecutorOption,
    FormatOption,
    KeyForm,
    OutputForm,
    OutputOption,
    RateLimitOption,
    SparkMasterOption,
    StartOption,
    StorageOption,
    bytes_per_second,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.report_file import ReportOption, reporting
from tikv_br.cli.restore_options import (
    AllowOverwriteOption,
    ChecksumOption,
    FileCheckOption,
    FilesOption,
    ImportModeOption,
    ModeOption,
    RegionSizeOption,
    RestampOption,
    RestoreWaitOption,
    ResumeOption,
    RewritePrefixOption,
    SendCredentialsOption,
    SourceKeyspaceOption,
    StateOption,
    ToKeyspaceOption,
    ViaOption,
)
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.restore.plan import FilePart, RestorePlan, Wanted
    from tikv_br.restore.run import RestoreSummary

app = typer.Typer(cls=DefaultCommandGroup, rich_markup_mode=None, no_args_is_help=True)
PLAN_ROWS = 20
"""Files of a plan that people are shown; JSON has them all."""
CHECKS = {
    "check the target": (
        "the target",
        "it held no key in the ranges that were to be restored, unless that was allowed or an earlier run had restored it",
    ),
    "check every file": (
        "the backup's files with its records, before any store saw one",
        "length, the storage's mark or the sha256 of all bytes, hash of the last part, and structure of each file",
    ),
    "compare checksums": (
        "the target with the backup",
        "keys, bytes and crc64 of every range, as the target's stores count them, beside what the backup recorded",
    ),
}
"""By the step that checks it: what and how."""


@app.callback()
def group() -> None:
    """Restore a backup into a cluster."""


@app.command("raw")
@grouped
def restore_raw(
    *,
    storage: StorageOption,
    cluster: ClusterFlags,
    start: StartOption = "",
    end: EndOption = "",
    key_form: FormatOption = KeyForm.HEX,
    keyspace: SourceKeyspaceOption = None,
    to_keyspace: ToKeyspaceOption = "",
    rewrite_prefix: RewritePrefixOption = "",
    mode: ModeOption = "ingest",
    via: ViaOption = "auto",
    restamp: RestampOption = False,
    concurrency: FilesOption = 16,
    region_size: RegionSizeOption = 96 << 20,
    import_mode: ImportModeOption = False,
    checksum: ChecksumOption = True,
    file_check: FileCheckOption = "auto",
    allow_overwrite: AllowOverwriteOption = False,
    ratelimit: RateLimitOption = 0.0,
    send_credentials: SendCredentialsOption = True,
    storage_flags: StorageFlags,
    executor: ExecutorOption = "auto",
    spark_master: SparkMasterOption = "local[*]",
    resume: ResumeOption = True,
    state: StateOption = "",
    lock_wait: RestoreWaitOption = 0.0,
    dry_run: DryRunOption = False,
    report: ReportOption = "",
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Restore a RawKV backup, of tikv-br or of the Go TiKV-BR, and prove the result."""
    with reporting("restore raw", report, CHECKS) as draft:
        if ratelimit and mode == "put":
            raise UsageError("--ratelimit limits downloads of stores: with --mode put there are none")
        if import_mode and mode == "put":
            raise UsageError(
                "--import-mode is for ingests: with --mode put there are none", hint="Leave one of the two out."
            )
        if restamp and mode == "put":
            raise UsageError(
                "--restamp: rows that are put have new timestamps anyway", hint="Leave one of the two out."
            )
        first, last = read_range(start, end, key_form)
        from tikv_br.restore.inspect import FileCheck
        from tikv_br.restore.options import Mode, RestoreOptions, Via
        from tikv_br.restore.run import restore
        from tikv_br.spark.executor import ExecutorOptions

        draft.place = storage_flags.locate(storage)
        options = RestoreOptions(
            cluster=cluster.config(),
            storage=draft.place,
            start=first,
            end=last,
            keyspace=keyspace,
            to_keyspace=to_keyspace,
            rewrite_prefix=_parse_rewrite(rewrite_prefix, key_form),
            mode=Mode(mode),
            via=Via(via),
            restamp=restamp,
            region_bytes=region_size,
            import_mode=import_mode,
            concurrency=concurrency,
            file_check=FileCheck(file_check),
            checksum=checksum,
            allow_overwrite=allow_overwrite,
            rate_limit=bytes_per_second(ratelimit),
            send_credentials=send_credentials,
            resume=resume,
            state=storage_flags.locate(state) if state else None,
            lock_wait=lock_wait,
            dry_run=dry_run,
            executor=ExecutorOptions(executor, spark_master, concurrency),
        )
        out = Output(output)
        with progress_display(out) as display:
            summary = restore(options, draft.listen(display), partial(_render_plan, out))
        draft.done(asdict(summary), _figures(summary))
        draft.keys = summary.total_kvs if summary.verified else 0
    out.result("summary", asdict(summary), _text(summary))


def _parse_rewrite(text: str, form: KeyForm) -> tuple[bytes, bytes]:
    """The prefixes of ``OLD=NEW``. Raises `UsageError`; a ``=`` of a prefix itself must be escaped, or be hex."""
    if not text:
        return b"", b""
    old, sign, new = text.partition("=")
    if not sign or "=" in new or not old + new:
        raise UsageError("--rewrite-prefix wants OLD=NEW", hint="One of them may be empty; write = itself in hex.")
    return read_key(old, form, "--rewrite-prefix"), read_key(new, form, "--rewrite-prefix")


def _render_plan(out: Output, plan: RestorePlan) -> None:
    """The plan in full for machines, its beginning for people."""
    files = [
        {"name": part.file.name, **_span(part), "total_kvs": part.file.total_kvs, "size": part.file.size}
        for part in plan.parts
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
        (part.file.name, part.target.start.hex() or "-", part.target.end.hex() or "-", human_bytes(part.file.size))
        for part in plan.parts[:PLAN_ROWS]
    ]
    title = f"{len(plan.parts)} files into {plan.regions} regions, {len(plan.splits)} splits before"
    out.table(("file", "from", "to", "stored"), rows, title=title)


def _span(each: FilePart | Wanted) -> dict[str, str]:
    return {
        "start": each.span.start.hex(),
        "end": each.span.end.hex(),
        "target_start": each.target.start.hex(),
        "target_end": each.target.end.hex(),
    }


def _text(summary: RestoreSummary) -> str:
    """The summary for people."""
    head = "Raw restore plan (dry run)" if summary.dry_run else "Raw restore success summary"
    return head + "".join(f"\n  {name:<18} {value}" for name, value in _figures(summary))


def _figures(summary: RestoreSummary) -> list[tuple[str, str]]:
    """What came of it, with the Go tool's names where it has them."""
    figures = [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("restore-data-size", human_bytes(summary.backup_size)),
        ("files", f"{summary.files:,}" + (f", {summary.resumed_files:,} before" if summary.resumed_files else "")),
        ("api-version", summary.dst_api_version),
        ("checksum", f"{summary.crc64xor:016x} {'equal' if summary.verified else 'not compared'}"),
    ]
    if summary.expired_kvs:
        figures.append(("expired", f"{summary.expired_kvs:,} rows left out"))
    return figures
