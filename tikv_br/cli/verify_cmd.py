"""``tikv-br verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import (
    ConcurrencyOption,
    ExecutorOption,
    OutputForm,
    OutputOption,
    SparkMasterOption,
    StorageOption,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.report_file import ReportOption, reporting
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.verify.options import Finding
    from tikv_br.verify.run import VerifySummary

app = typer.Typer(rich_markup_mode=None)
CHECKS = {
    "read the backup": ("the backup's records with each other", "hashes, form, and what each says of the other"),
    "list the objects": ("the records with what is there", "a listing: each object is there in its size"),
    "check every byte": ("the files with their records", "every byte of the chosen files: length and sha256"),
    "check every row": (
        "the rows with their records",
        "every byte of the chosen files: sha256, block checksums, order and form of the rows, sums",
    ),
    "compare with the cluster": (
        "the cluster with the backup",
        "keys, bytes and crc64 of every range of the chosen files, as the stores count them",
    ),
}
"""By the step that checks it: what and how."""


@app.command("verify")
@grouped
def verify_backup(
    *,
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the backup lies; the same as --storage.")] = "",
    storage: StorageOption = "",
    level: Annotated[
        Literal["meta", "files", "data", "restore"],
        typer.Option("--level", help="How deep to look; restore: compare a cluster."),
    ] = "files",
    subset: Annotated[
        str, typer.Option("--subset", metavar="N%|K/N", help="Look into a part of the files only: 10%, or 3/10.")
    ] = "100%",
    seed: Annotated[int, typer.Option("--seed", help="Which files --subset takes; the same seed, the same files.")] = 0,
    cluster: ClusterFlags,
    storage_flags: StorageFlags,
    executor: ExecutorOption = "auto",
    spark_master: SparkMasterOption = "local[*]",
    concurrency: ConcurrencyOption = None,
    report: ReportOption = "",
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Check that a backup is whole, or that a cluster holds what it holds."""
    with reporting("verify", report, CHECKS) as draft:
        location = draft.place = storage_flags.locate(_place(context, url, storage))
        from tikv_br.verify.options import Executor, Level, VerifyOptions
        from tikv_br.verify.run import verify
        from tikv_br.verify.subset import Subset

        options = VerifyOptions(
            storage=location,
            level=Level(level),
            cluster=cluster.config() if level == "restore" else None,
            subset=Subset.parse(subset),
            seed=seed,
            executor=Executor(executor),
            spark_master=spark_master,
            concurrency=concurrency,
        )
        out = Output(output)
        findings: list[Finding] = []

        def note(finding: Finding) -> None:
            findings.append(finding)
            draft.found(finding.object, finding.cause)
            out.result("finding", asdict(finding))

        try:
            with progress_display(out) as display:
                summary = verify(options, draft.listen(display), note)
        finally:
            if findings:
                rows = [(finding.object, finding.level.value, finding.cause) for finding in findings]
                out.table(("object", "level", "cause"), rows, title="Findings")
        draft.done(asdict(summary), _figures(summary))
        draft.keys, draft.bytes = summary.rows_checked, summary.bytes_read
    out.result("summary", asdict(summary), _text(summary))


def _place(context: typer.Context, url: str, storage: str) -> str:
    """The place that was named, either way; a URL goes before the environment's TIKV_BR_STORAGE."""
    source = context.get_parameter_source("storage")
    if url and source is not None and source.name == "COMMANDLINE":
        raise UsageError("the backup is named twice: by its URL and by --storage", hint="Say one of them.")
    if not url and not storage:
        raise UsageError("no backup is named", hint="Say tikv-br verify URL, or --storage URL.")
    return url or storage


def _text(summary: VerifySummary) -> str:
    """The summary for people."""
    lines = "".join(f"\n  {name:<18} {value}" for name, value in _figures(summary))
    return f"Verified: all that was checked is right{lines}"


def _figures(summary: VerifySummary) -> list[tuple[str, str]]:
    """What was checked, and what was not."""
    figures = [("level", summary.level), ("files present", f"{summary.files:,}")]
    if summary.level != "meta":
        seed = f", {summary.subset} with seed {summary.seed}" if summary.files_checked < summary.files else ""
        verb = "compared" if summary.level == "restore" else "read"
        figures.append((f"files {verb}", f"{summary.files_checked:,} of {summary.files:,}{seed}"))
    if summary.level in {"data", "restore"}:
        figures.append(("rows", f"{summary.rows_checked:,}"))
    if summary.bytes_read:
        figures.append(("read", human_bytes(summary.bytes_read)))
    if summary.foreign_objects:
        figures.append(("foreign objects", f"{summary.foreign_objects:,}"))
    figures += [("api-version", summary.api_version), ("total-take", human_seconds(summary.seconds))]
    return figures
