"""``tikv-br diff``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from msgspec import structs

from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.command import command, flag, given
from tikv_br.cli.output import KeyForm, Output, human_bytes, human_seconds, listed, reporting, show
from tikv_br.cli.progress import progress_display
from tikv_br.errors import DifferencesFound, UsageError

if TYPE_CHECKING:
    from tikv_br.compare.report import Counts, DifferentRange
    from tikv_br.diff.places import BackupChoice, ClusterChoice
    from tikv_br.diff.run import DiffResult, DiffSummary

RANGES_SHOWN = 20
KINDS = {"only_a": "only in A", "only_b": "only in B", "value": "different value"}


class FirstClusterFlags(shared.ClusterFlags):
    """The first cluster; a second ``--pd`` names the other one."""

    pd: list[str] = shared.pd(
        "PD endpoints of A (of B with --storage), comma-separated: host:port,… A second --pd names B."
    )


class DiffFlags(backup_flags.ChosenBackupFlags):
    cluster: FirstClusterFlags
    keyspace: str = flag(
        "",
        "Keyspace of A, by id or name (API V2; default: 0, or the keyspace of the backup).",
        shared=True,
        metavar="ID|NAME",
    )
    other_pd: str = flag("", "PD endpoints of cluster B, comma-separated: host:port,…", metavar="ADDRESS")
    other_ca: str | None = flag(None, "CA certificate for --other-pd (PEM; default: --ca).", metavar="FILE")
    other_cert: str | None = flag(None, "Client certificate for --other-pd (PEM; default: --cert).", metavar="FILE")
    other_key: str | None = flag(None, "Private key of --other-cert (PEM; default: --key).", metavar="FILE")
    other_keyspace: str = flag(
        "",
        "Keyspace of B, by id or name (API V2; default: the one with the same name as the keyspace of A).",
        metavar="ID|NAME",
    )
    range: key_flags.RangeOrPrefixFlags
    allow_empty: bool = shared.ALLOW_EMPTY()
    keys: int = flag(20, "Maximum number of differing keys to list; all are counted.", limits=(0, kinds.MAX_COUNT))
    exact: bool = flag(
        False, "Compare every row instead of checksums, which can miss the same change to an even number of rows."
    )
    repair: bool = flag(False, "Copy rows of A to B where B lacks them or has another value.", command_line=True)
    repair_missing: bool = flag(False, "With --repair: only copy rows that B lacks.", command_line=True)
    repair_delete: bool = flag(
        False, "With --repair: also delete the rows of B that A does not have.", command_line=True
    )
    yes: bool = flag(
        False,
        "Repair without asking. Required without a terminal and with --output json.",
        "--yes",
        "--confirm",
        command_line=True,
    )
    tasks: shared.TaskFlags
    report: str = shared.REPORT()


@command("diff", example="--pd 10.0.0.1:2379 --other-pd 10.0.1.1:2379")
def diff_sides(flags: DiffFlags, context: typer.Context) -> None:
    """Compare two clusters, or a cluster with a backup.

    Two clusters: A is --pd, B is --other-pd. With a backup (URL, or --storage): A is the backup, B is --pd. --repair only writes to B.
    """
    with reporting("diff", flags.report) as draft:
        out, repair_delete = flags.out, flags.repair_delete
        if flags.repair and not flags.yes and (out.is_json or not (sys.stdin.isatty() and sys.stderr.isatty())):
            raise UsageError("--repair needs a confirmation, and there is no terminal", hint="Pass --yes.")
        if (repair_delete or flags.repair_missing) and not flags.repair:
            raise UsageError("--repair-delete and --repair-missing need --repair")
        span = flags.range.key_range()
        from tikv_br.diff import run
        from tikv_br.diff.places import BackupChoice, ClusterChoice, DiffOptions

        cluster, other = _two_clusters(context, flags)
        _require_one_side(other, flags.chosen or (flags.storage if not other or given(context, "storage") else ""))
        near, keyspace = cluster.config(), flags.keyspace
        draft.cluster = ",".join(near.pd)
        a: ClusterChoice | BackupChoice
        if other:
            far = cluster.other(other, flags.other_ca or None, flags.other_cert, flags.other_key)
            a, b = ClusterChoice(near, keyspace), ClusterChoice(far, flags.other_keyspace)
            draft.cluster += f" and {','.join(far.pd)}"
        else:
            draft.place = place = flags.choose(context)
            a, b = BackupChoice(place, keyspace), ClusterChoice(near, flags.other_keyspace)
        options = flags.fill(DiffOptions, a=a, b=b, span=span)
        with progress_display(out) as display:
            result = run.diff(options, draft.listen(display))
        _list(out, result, flags.range.form)
        if flags.repair and result.summary.remaining and (flags.yes or _ask(result.summary, flags)):
            with progress_display(out) as display:
                result = run.repair(
                    result, draft.listen(display), delete=repair_delete, missing_only=flags.repair_missing
                )
        summary = result.summary
        draft.done(asdict(summary), _figures(summary))
        draft.keys, draft.bytes = summary.rows, summary.scanned_bytes
        for span, counts in result.ranges:
            draft.found(f"{span.start.hex() or '-'} to {span.end.hex() or '-'}", _counted(counts))
        _end(out, summary)


def _two_clusters(context: typer.Context, flags: DiffFlags) -> tuple[shared.ClusterFlags, str]:
    """The first cluster, and PD of the second: ``--pd A --pd B`` names two clusters, other commands take it for one."""
    cluster = flags.cluster
    if not flags.other_pd and len(cluster.pd) == 2 and given(context, "pd"):
        return cluster.replaced(pd=cluster.pd[:1]), cluster.pd[1]
    return cluster, flags.other_pd


def _require_one_side(other: str, storage: str) -> None:
    if bool(other) == bool(storage):
        problem = "too much" if other else "nothing"
        raise UsageError(
            f"{problem} to compare with", hint="Pass --pd A --other-pd B for two clusters, or --pd B URL for a backup."
        )


def _ask(found: DiffSummary, flags: DiffFlags) -> bool:
    deletes = f" and delete {found.only_b:,}" if flags.repair_delete else ""
    writes = found.only_a + (0 if flags.repair_missing else found.value)
    return typer.confirm(f"{found.remaining:,} keys differ. Write {writes:,} to B{deletes}?", err=True)


def _list(out: Output, result: DiffResult, form: KeyForm) -> None:
    for each in result.ranges:
        out.result(
            "different_range",
            {"start": each.span.start.hex(), "end": each.span.end.hex(), **structs.asdict(each.counts)},
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


def _figures(summary: DiffSummary) -> list[tuple[str, str]]:
    """Return the figures of the summary: compared, found and repaired."""
    asked = f"{summary.checksum_requests:,} checksums, {summary.scan_requests:,} scans"
    repaired = f"{summary.puts:,} written, {summary.deletes:,} deleted; {summary.remaining:,} left"
    return [
        ("A", summary.a),
        ("B", summary.b),
        ("compared", f"{summary.rows:,} rows, {human_bytes(summary.bytes)}, {summary.ranges:,} ranges"),
        *((name, f"{getattr(summary, kind):,}") for kind, name in KINDS.items()),
        ("expiring", f"{summary.expiring:,} (no differences)" if summary.expiring else ""),
        ("requests", f"{asked} ({human_bytes(summary.scanned_bytes)})"),
        ("repaired", repaired if summary.puts or summary.deletes else ""),
        ("total-take", human_seconds(summary.seconds)),
    ]


def _end(out: Output, summary: DiffSummary) -> None:
    """Print the summary. Raises `DifferencesFound` if differences remain."""
    title = "Different" if summary.remaining else "Equal"
    out.result("summary", asdict(summary), listed(title, _figures(summary), width=12))
    if summary.remaining:
        raise DifferencesFound(
            f"{summary.remaining:,} {'key differs' if summary.remaining == 1 else 'keys differ'}", hint=_hint(summary)
        )


def _hint(summary: DiffSummary) -> str | None:
    """Return a hint with the flags that repair the remaining differences; None = the error's default hint."""
    if summary.puts and not summary.deletes and summary.remaining > summary.only_b:  # --repair-missing
        return "Rows of B with other values were left as they are, as were those that only B has: `--repair` without --repair-missing overwrites the former."
    if summary.puts or summary.deletes or (summary.only_b and not summary.only_a + summary.value):
        return "Only B has rows that differ: `--repair --repair-delete` deletes them." if summary.only_b else None
    if summary.only_b:
        return "`--repair` writes A's rows to B where they are missing or different; with `--repair-delete` it also deletes rows that only B has."
    return None
