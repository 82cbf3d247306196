"""``tikv-br restore raw`` and, for short, ``tikv-br restore``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from formats.errors import InvalidKeyText
from formats.keytext import parse_key
from tikv_br.cli.lazy import DefaultCommandGroup
from tikv_br.cli.options import (
    DEFAULT_PD,
    CaOption,
    CertOption,
    CrypterKeyFileOption,
    CrypterKeyOption,
    CrypterMethodOption,
    DryRunOption,
    EndOption,
    ExecutorOption,
    FormatOption,
    KeyForm,
    KeyOption,
    OutputForm,
    OutputOption,
    PdOption,
    RateLimitOption,
    S3AclOption,
    S3EndpointOption,
    S3PathStyleOption,
    S3ProviderOption,
    S3RegionOption,
    S3SseKmsKeyOption,
    S3SseOption,
    S3StorageClassOption,
    SparkMasterOption,
    StartOption,
    StorageOption,
    bytes_per_second,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.storage_location import storage_location
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.restore.plan import FilePart, RestorePlan, Wanted
    from tikv_br.restore.run import RestoreSummary

app = typer.Typer(cls=DefaultCommandGroup, rich_markup_mode=None, no_args_is_help=True)
PLAN_ROWS = 20
"""Files of a plan that people are shown; JSON has them all."""


@app.callback()
def group() -> None:
    """Restore a backup into a cluster."""


@app.command("raw")
def restore_raw(
    storage: StorageOption,
    pd: PdOption = DEFAULT_PD,
    start: StartOption = "",
    end: EndOption = "",
    key_form: FormatOption = KeyForm.HEX,
    keyspace: Annotated[
        int | None,
        typer.Option("--keyspace", min=0, metavar="ID", help="Restore only this keyspace of the backup (API V2)."),
    ] = None,
    to_keyspace: Annotated[
        str, typer.Option("--to-keyspace", metavar="ID|NAME", help="Keyspace that the rows are to be in (API V2).")
    ] = "",
    rewrite_prefix: Annotated[
        str,
        typer.Option(
            "--rewrite-prefix",
            metavar="OLD=NEW",
            help="Restore only keys that begin with OLD, with NEW in its place; written as --format says.",
        ),
    ] = "",
    mode: Annotated[
        Literal["ingest", "put"],
        typer.Option("--mode", help="Stores take in whole files, or rows are put one by one."),
    ] = "ingest",
    via: Annotated[
        Literal["auto", "stores", "upload"],
        typer.Option("--via", help="Stores fetch files themselves, or are sent them from here where they cannot."),
    ] = "auto",
    restamp: Annotated[
        bool,
        typer.Option("--restamp", help="Give rows newer than the target's TSO a timestamp of the target (API V2)."),
    ] = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", envvar="TIKV_BR_CONCURRENCY", min=1, help="Files under way at once.")
    ] = 16,
    import_mode: Annotated[
        bool,
        typer.Option(
            "--import-mode/--online",
            help="Put stores into import mode and pause PD's balancing meanwhile, or leave the cluster to its users.",
        ),
    ] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum/--no-checksum", help="Compare the cluster's checksums with the backup's.")
    ] = True,
    file_check: Annotated[
        Literal["auto", "identity", "content"],
        typer.Option("--file-check", help="How much of each file is read before."),
    ] = "auto",
    allow_overwrite: Annotated[
        bool, typer.Option("--allow-overwrite", help="Restore into a range that holds data.")
    ] = False,
    ratelimit: RateLimitOption = 0.0,
    send_credentials: Annotated[
        bool,
        typer.Option(
            "--send-credentials-to-tikv/--no-send-credentials-to-tikv",
            help="Give the stores this process's storage credentials; without, they use their own.",
        ),
    ] = True,
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
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on with an unfinished restore of this backup, or begin anew."),
    ] = True,
    state: Annotated[
        str,
        typer.Option(
            "--state",
            envvar="TIKV_BR_STATE",
            metavar="URL",
            help="Where it is written down what is done, to be resumed; by default beside the backup.",
        ),
    ] = "",
    dry_run: DryRunOption = False,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Restore a RawKV backup, of tikv-br or of the Go TiKV-BR, and prove the result."""
    if ratelimit and mode == "put":
        raise UsageError("--ratelimit limits downloads of stores: with --mode put there are none")
    if import_mode and mode == "put":
        raise UsageError(
            "--import-mode is for ingests: with --mode put there are none", hint="Leave one of the two out."
        )
    if restamp and mode == "put":
        raise UsageError("--restamp: rows that are put have new timestamps anyway", hint="Leave one of the two out.")
    first, last = _parse_keys(start, end, key_form)
    located = partial(
        storage_location,
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
    from tikv_br.restore.inspect import FileCheck
    from tikv_br.restore.options import Mode, RestoreOptions, Via
    from tikv_br.restore.run import restore
    from tikv_br.spark.executor import ExecutorOptions

    options = RestoreOptions(
        cluster=ClusterConfig.from_flags(pd, ca=ca, cert=cert, key=key),
        storage=located(storage),
        start=first,
        end=last,
        keyspace=keyspace,
        to_keyspace=to_keyspace,
        rewrite_prefix=_parse_rewrite(rewrite_prefix, key_form),
        mode=Mode(mode),
        via=Via(via),
        restamp=restamp,
        import_mode=import_mode,
        concurrency=concurrency,
        file_check=FileCheck(file_check),
        checksum=checksum,
        allow_overwrite=allow_overwrite,
        rate_limit=bytes_per_second(ratelimit),
        send_credentials=send_credentials,
        resume=resume,
        state=located(state) if state else None,
        dry_run=dry_run,
        executor=ExecutorOptions(executor, spark_master, concurrency),
    )
    out = Output(output)
    with progress_display(out) as display:
        summary = restore(options, display, partial(_render_plan, out))
    out.result("summary", asdict(summary), _text(summary))


def _parse_keys(start: str, end: str, form: KeyForm) -> tuple[bytes, bytes]:
    """The range of the flags. Raises `UsageError` for keys that do not parse and for a range that holds none."""
    try:
        first, last = parse_key(start, form.value), parse_key(end, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"--start/--end: {error}", hint="See --format: hex is the default.") from None
    if last and first >= last:
        raise UsageError("--start must lie before --end")
    return first, last


def _parse_rewrite(text: str, form: KeyForm) -> tuple[bytes, bytes]:
    """The prefixes of ``OLD=NEW``. Raises `UsageError`; a ``=`` of a prefix itself must be escaped, or be hex."""
    if not text:
        return b"", b""
    old, sign, new = text.partition("=")
    if not sign or "=" in new or not old + new:
        raise UsageError("--rewrite-prefix wants OLD=NEW", hint="One of them may be empty; write = itself in hex.")
    try:
        return parse_key(old, form.value), parse_key(new, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"--rewrite-prefix: {error}", hint="See --format: hex is the default.") from None


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
    """The summary for people, with the Go tool's names where it has them."""
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
    head = "Raw restore plan (dry run)" if summary.dry_run else "Raw restore success summary"
    return head + "".join(f"\n  {name:<18} {value}" for name, value in figures)
