"""``tikv-br verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tikv_br.cli.options import (
    DEFAULT_PD,
    CaOption,
    CertOption,
    ConcurrencyOption,
    CrypterKeyFileOption,
    CrypterKeyOption,
    CrypterMethodOption,
    ExecutorOption,
    KeyOption,
    OutputForm,
    OutputOption,
    PdOption,
    S3AclOption,
    S3EndpointOption,
    S3PathStyleOption,
    S3ProviderOption,
    S3RegionOption,
    S3SseKmsKeyOption,
    S3SseOption,
    S3StorageClassOption,
    SparkMasterOption,
    StorageOption,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.storage_location import storage_location
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.verify.options import Finding
    from tikv_br.verify.run import VerifySummary

app = typer.Typer(rich_markup_mode=None)


@app.command("verify")
def verify_backup(
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
    pd: PdOption = DEFAULT_PD,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    s3_endpoint: S3EndpointOption = None,
    s3_region: S3RegionOption = None,
    s3_storage_class: S3StorageClassOption = None,
    s3_sse: S3SseOption = None,
    s3_sse_kms_key_id: S3SseKmsKeyOption = None,
    s3_acl: S3AclOption = None,
    s3_provider: S3ProviderOption = None,
    s3_force_path_style: S3PathStyleOption = None,
    crypter_method: CrypterMethodOption = "",
    crypter_key: CrypterKeyOption = "",
    crypter_key_file: CrypterKeyFileOption = "",
    executor: ExecutorOption = "auto",
    spark_master: SparkMasterOption = "local[*]",
    concurrency: ConcurrencyOption = None,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Check that a backup is whole, or that a cluster holds what it holds."""
    location = storage_location(
        _place(context, url, storage),
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
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.verify.options import Executor, Level, VerifyOptions
    from tikv_br.verify.run import verify
    from tikv_br.verify.subset import Subset

    options = VerifyOptions(
        storage=location,
        level=Level(level),
        cluster=ClusterConfig.from_flags(pd, ca=ca, cert=cert, key=key) if level == "restore" else None,
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
        out.result("finding", asdict(finding))

    try:
        with progress_display(out) as display:
            summary = verify(options, display, note)
    finally:
        if findings:
            rows = [(finding.object, finding.level.value, finding.cause) for finding in findings]
            out.table(("object", "level", "cause"), rows, title="Findings")
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
    """The summary for people: what was checked, and what was not."""
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
    return "Verified: all that was checked is right" + "".join(f"\n  {name:<18} {value}" for name, value in figures)
