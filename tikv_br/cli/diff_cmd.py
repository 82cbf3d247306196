"""``tikv-br diff``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli import options
from tikv_br.cli.keys import read_range, show
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import KeyForm, OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.report_file import ReportOption, reporting
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import DifferencesFound, UsageError

if TYPE_CHECKING:
    from tikv_br.diff.options import BackupChoice, ClusterChoice
    from tikv_br.diff.run import DiffResult, DiffSummary
    from tikv_br.diff.values import Counts, DifferentRange

app = typer.Typer(rich_markup_mode=None)
RANGES_SHOWN = 20
CHECKS = {
    "compare": (
        "both sides",
        "range by range: the checksums of both, and all rows of both where they differ or are asked to be read",
    ),
}
"""By the step that checks it: what and how."""
KINDS = {"only_a": "only in A", "only_b": "only in B", "value": "other value"}

OtherPdOption = Annotated[
    str, typer.Option("--other-pd", metavar="ADDRESS", help="PD of the second cluster, or several: host:port,…")
]
OtherCaOption = Annotated[
    str | None, typer.Option("--other-ca", metavar="FILE", help="--ca for --other-pd, if another.")
]
OtherCertOption = Annotated[
    str | None, typer.Option("--other-cert", metavar="FILE", help="--cert for --other-pd, if another.")
]
OtherKeyOption = Annotated[
    str | None, typer.Option("--other-key", metavar="FILE", help="--key for --other-pd, if another.")
]
OtherKeyspaceOption = Annotated[
    str,
    typer.Option("--other-keyspace", metavar="ID|NAME", help="Keyspace of B, if it is not that of A."),
]


@app.command("diff", no_args_is_help=True)
@grouped
def diff_sides(
    *,
    context: typer.Context,
    cluster: ClusterFlags,
    keyspace: options.KeyspaceOption = "",
    other_pd: OtherPdOption = "",
    other_ca: OtherCaOption = None,
    other_cert: OtherCertOption = None,
    other_key: OtherKeyOption = None,
    other_keyspace: OtherKeyspaceOption = "",
    storage: options.StorageOption = "",
    storage_flags: StorageFlags,
    start: options.StartOption = "",
    end: options.EndOption = "",
    form: options.FormatOption = KeyForm.RAW,
    keys: Annotated[
        int, typer.Option("--keys", min=0, metavar="N", help="How many keys to name; all are counted.")
    ] = 20,
    exact: Annotated[
        bool, typer.Option("--exact", help="Read all rows on both sides: checksums miss changes that cancel out.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Write to B what only A has, or has otherwise.")] = False,
    repair_delete: Annotated[
        bool, typer.Option("--repair-delete", help="With --repair: also remove from B what only B has.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Repair without asking; needed where nobody can be asked.")
    ] = False,
    executor: options.ExecutorOption = "auto",
    spark_master: options.SparkMasterOption = "local[*]",
    concurrency: options.ConcurrencyOption = None,
    report: ReportOption = "",
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Find the keys that differ between two clusters, or from a backup."""
    with reporting("diff", report, CHECKS) as draft:
        if repair and not yes and not _can_ask(output):
            raise UsageError("--repair writes, and nobody can be asked here", hint="Say --yes.")
        if repair_delete and not repair:
            raise UsageError("--repair-delete goes with --repair")
        first, last = read_range(start, end, form)
        from tikv_br.diff import run
        from tikv_br.diff.options import BackupChoice, ClusterChoice, DiffOptions

        cluster, other = _two_clusters(context, cluster, other_pd)
        _one_other(other, storage if not other or _said(context, "storage") else "")
        near = cluster.config()
        a: ClusterChoice | BackupChoice
        if other:
            far = ClusterFlags(
                pd=[other],
                ca=other_ca or cluster.ca,
                cert=other_cert or cluster.cert,
                key=other_key or cluster.key,
            )
            a, b = ClusterChoice(near, keyspace), ClusterChoice(far.config(), other_keyspace or keyspace)
        else:
            place = draft.place = storage_flags.locate(storage)
            a, b = BackupChoice(place, keyspace), ClusterChoice(near, other_keyspace or keyspace)
        asked = DiffOptions(a, b, first, last, keys, exact, executor, spark_master, concurrency)
        out = Output(output)
        with progress_display(out) as display:
            result = run.diff(asked, draft.listen(display))
        _list(out, result, form)
        if repair and result.summary.remaining and (yes or _ask(result.summary, delete=repair_delete)):
            with progress_display(out) as display:
                result = run.repair(result, draft.listen(display), delete=repair_delete)
        summary = result.summary
        draft.done(asdict(summary), _figures(summary))
        draft.keys, draft.bytes = summary.rows, summary.scanned_bytes
        for span, counts in result.ranges:
            draft.found(f"{span.start.hex() or '-'} to {span.end.hex() or '-'}", _counted(counts))
        _end(out, summary)


def _two_clusters(context: typer.Context, cluster: ClusterFlags, other_pd: str) -> tuple[ClusterFlags, str]:
    """The first cluster, and PD of the second. ``--pd A --pd B`` names both; elsewhere it names members of one."""
    if not other_pd and len(cluster.pd) == 2 and _said(context, "pd"):
        return replace(cluster, pd=cluster.pd[:1]), cluster.pd[1]
    return cluster, other_pd


def _said(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _one_other(other: str, storage: str) -> None:
    if bool(other) == bool(storage):
        problem = "too much" if other else "nothing"
        raise UsageError(
            f"{problem} to compare with", hint="Say --pd A --other-pd B for two clusters, or --pd B --storage URL."
        )


def _can_ask(output: OutputForm) -> bool:
    return output is OutputForm.CONSOLE and sys.stdin.isatty() and sys.stderr.isatty()


def _ask(found: DiffSummary, *, delete: bool) -> bool:
    deletes = f", and remove {found.only_b:,}" if delete else ""
    return typer.confirm(
        f"{found.remaining:,} keys differ. Write {found.only_a + found.value:,} to B{deletes}?", err=True
    )


def _list(out: Output, result: DiffResult, form: KeyForm) -> None:
    for each in result.ranges:
        out.result(
            "different_range", {"start": each.span.start.hex(), "end": each.span.end.hex(), **asdict(each.counts)}
        )
    for difference in result.keys:
        fields = {"key": difference.key.hex(), "kind": difference.kind.value, "expires_in": difference.expires_in}
        out.result("different_key", fields)
    if result.ranges:
        rows = [_range_row(each, form) for each in result.ranges[:RANGES_SHOWN]]
        more = len(result.ranges) - len(rows)
        title = "Ranges that differ" + (f" (the first {len(rows)}, {more:,} more)" if more else "")
        out.table(("start", "end", *KINDS.values()), rows, title=title)
    if result.keys:
        keys = [
            (KINDS[each.kind.value], show(each.key, form), f"in {each.expires_in:,} s" if each.expires_in else "")
            for each in result.keys
        ]
        more = result.summary.only_a + result.summary.only_b + result.summary.value - len(keys)
        title = "Keys that differ" + (f" (the first {len(keys)}, {more:,} more: --keys)" if more > 0 else "")
        out.table(("how", "key", "expires"), keys, title=title)
    out.flush()


def _range_row(each: DifferentRange, form: KeyForm) -> tuple[str, ...]:
    span, counts = each
    numbers = (f"{number:,}" for number in (counts.only_a, counts.only_b, counts.value))
    return (show(span.start, form) or "(start)", show(span.end, form) or "(end)", *numbers)


def _counted(counts: Counts) -> str:
    return ", ".join(f"{getattr(counts, kind):,} {name}" for kind, name in KINDS.items() if getattr(counts, kind))


def _text(summary: DiffSummary) -> str:
    """The summary for people."""
    head = "Equal" if not summary.remaining else "Different"
    return head + "".join(f"\n  {name:<12} {value}" for name, value in _figures(summary))


def _figures(summary: DiffSummary) -> list[tuple[str, str]]:
    """What was compared, found and done."""
    figures = [
        ("A", summary.a),
        ("B", summary.b),
        ("compared", f"{summary.rows:,} rows, {human_bytes(summary.bytes)}, {summary.ranges:,} ranges"),
        *((name, f"{getattr(summary, kind):,}") for kind, name in KINDS.items()),
    ]
    if summary.expiring:
        figures.append(("expiring", f"{summary.expiring:,} (no differences)"))
    asked = f"{summary.checksum_requests:,} checksums, {summary.scan_requests:,} reads"
    figures.append(("asked", f"{asked} ({human_bytes(summary.scanned_bytes)})"))
    if summary.puts or summary.deletes:
        figures.append(
            ("repaired", f"{summary.puts:,} written, {summary.deletes:,} removed; {summary.remaining:,} left")
        )
    figures.append(("total-take", human_seconds(summary.seconds)))
    return figures


def _end(out: Output, summary: DiffSummary) -> None:
    """Tell the summary. Raises `DifferencesFound`, unless there are none (any more)."""
    out.result("summary", asdict(summary), _text(summary))
    if summary.remaining:
        hint = "Say --repair-delete to remove what only B has." if summary.puts or summary.deletes else None
        raise DifferencesFound(
            f"{summary.remaining:,} {'key differs' if summary.remaining == 1 else 'keys differ'}", hint=hint
        )
