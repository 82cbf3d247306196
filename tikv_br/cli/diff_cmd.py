"""``tikv-br diff``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli import options
from tikv_br.cli.options import KeyForm, OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.raw_session import read_range, show
from tikv_br.cli.storage_location import storage_location
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import DifferencesFound, UsageError

if TYPE_CHECKING:
    from tikv_br.diff.options import BackupChoice, ClusterChoice
    from tikv_br.diff.run import DiffResult, DiffSummary
    from tikv_br.diff.values import DifferentRange

app = typer.Typer(rich_markup_mode=None)
RANGES_SHOWN = 20
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
def diff_sides(
    context: typer.Context,
    pd: options.PdOption = options.DEFAULT_PD,
    ca: options.CaOption = None,
    cert: options.CertOption = None,
    key: options.KeyOption = None,
    keyspace: options.KeyspaceOption = "",
    other_pd: OtherPdOption = "",
    other_ca: OtherCaOption = None,
    other_cert: OtherCertOption = None,
    other_key: OtherKeyOption = None,
    other_keyspace: OtherKeyspaceOption = "",
    storage: options.StorageOption = "",
    s3_endpoint: options.S3EndpointOption = None,
    s3_region: options.S3RegionOption = None,
    s3_storage_class: options.S3StorageClassOption = None,
    s3_sse: options.S3SseOption = None,
    s3_sse_kms_key_id: options.S3SseKmsKeyOption = None,
    s3_acl: options.S3AclOption = None,
    s3_provider: options.S3ProviderOption = None,
    s3_force_path_style: options.S3PathStyleOption = None,
    crypter_method: options.CrypterMethodOption = "",
    crypter_key: options.CrypterKeyOption = "",
    crypter_key_file: options.CrypterKeyFileOption = "",
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
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Find the keys that differ between two clusters, or from a backup."""
    if repair and not yes and not _can_ask(output):
        raise UsageError("--repair writes, and nobody can be asked here", hint="Say --yes.")
    if repair_delete and not repair:
        raise UsageError("--repair-delete goes with --repair")
    first, last = read_range(start, end, form)
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.diff import run
    from tikv_br.diff.options import BackupChoice, ClusterChoice, DiffOptions

    named, other = _two_clusters(context, pd, other_pd)
    _one_other(other, storage if not other or _said(context, "storage") else "")
    near = ClusterConfig.from_flags(named, ca=ca, cert=cert, key=key)
    a: ClusterChoice | BackupChoice
    if other:
        far = ClusterConfig.from_flags(other, ca=other_ca or ca, cert=other_cert or cert, key=other_key or key)
        a, b = ClusterChoice(near, keyspace), ClusterChoice(far, other_keyspace or keyspace)
    else:
        place = storage_location(
            storage,
            endpoint=s3_endpoint,
            region=s3_region,
            storage_class=s3_storage_class,
            sse=s3_sse,
            sse_kms_key_id=s3_sse_kms_key_id,
            acl=s3_acl,
            provider=s3_provider,
            force_path_style=s3_force_path_style,
            crypter_method=crypter_method,
            crypter_key=crypter_key,
            crypter_key_file=crypter_key_file,
        )
        a, b = BackupChoice(place, keyspace), ClusterChoice(near, other_keyspace or keyspace)
    asked = DiffOptions(a, b, first, last, keys, exact, executor, spark_master, concurrency)
    out = Output(output)
    with progress_display(out) as display:
        result = run.diff(asked, display)
    _list(out, result, form)
    if repair and result.summary.remaining and (yes or _ask(result.summary, delete=repair_delete)):
        with progress_display(out) as display:
            result = run.repair(result, display, delete=repair_delete)
    _end(out, result.summary)


def _two_clusters(context: typer.Context, pd: Sequence[str], other_pd: str) -> tuple[Sequence[str], str]:
    """PD of the first and of the second cluster. ``--pd A --pd B`` names both; elsewhere it names members of one."""
    if not other_pd and len(pd) == 2 and _said(context, "pd"):
        return pd[:1], pd[1]
    return pd, other_pd


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


def _text(summary: DiffSummary) -> str:
    """The summary for people."""
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
    head = "Equal" if not summary.remaining else "Different"
    return head + "".join(f"\n  {name:<12} {value}" for name, value in figures)


def _end(out: Output, summary: DiffSummary) -> None:
    """Tell the summary. Raises `DifferencesFound`, unless there are none (any more)."""
    out.result("summary", asdict(summary), _text(summary))
    if summary.remaining:
        hint = "Say --repair-delete to remove what only B has." if summary.puts or summary.deletes else None
        raise DifferencesFound(
            f"{summary.remaining:,} {'key differs' if summary.remaining == 1 else 'keys differ'}", hint=hint
        )
