"""``tikv-br load raw``: files, or any other input that Spark reads, become rows of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, command, flag, given
from tikv_br.cli.output import human_bytes, human_seconds, listed
from tikv_br.cli.progress import progress_display
from tikv_br.errors import UsageError
from tikv_br.tasks.settings import check_settings

if TYPE_CHECKING:
    from tikv_br.bulk_load.run import BulkLoadSummary


class BulkLoadFlags(shared.CommandFlags):
    input: str = flag(
        REQUIRED,
        "Path, folder or glob to read, as Spark takes it, or a URL of S3, GCS or Azure as for --storage.",
        metavar="PATH",
    )
    input_format: str = flag(
        "",
        "Format of the input: parquet, csv, jsonl, orc or any other that Spark has (default: by the suffix of the path).",
        metavar="NAME",
    )
    input_option: list[str] = flag(
        [],
        "Option of Spark's own reader for the format, which then reads the input (may be repeated).",
        metavar="KEY=VALUE",
    )
    csv_delimiter: str = flag(",", "Sign between the fields of CSV; \\t is a tab.", metavar="CHAR")
    csv_quote: str = flag(
        '"', "Sign around fields of CSV, doubled inside them (empty: quotes are plain text).", metavar="CHAR"
    )
    csv_escape: str = flag(
        "", "Sign in CSV that makes the next one plain text (default: none, as in RFC 4180).", metavar="CHAR"
    )
    csv_encoding: str = flag("utf-8", "Encoding of CSV, such as latin-1, cp1252 or utf-16.", metavar="NAME")
    csv_null: str = flag(
        "", "Text of a CSV field without quotes that is null, such as \\N (default: the empty field).", metavar="TEXT"
    )
    encoding: Literal["raw", "hex", "escaped"] | None = flag(
        None,
        "Keys and values in CSV and JSON lines: raw (text), hex, or escaped (\\xNN).",
        show_default="as an export says of itself, else raw",
    )
    key_column: str = flag(REQUIRED, "Column with the keys: binary, string or an integer.", metavar="COLUMN")
    value_column: str = flag(
        REQUIRED, "Column with the values: binary, string, an integer, struct, array or map.", metavar="COLUMN"
    )
    value_encoding: Literal["json", "avro"] = flag(
        "json", "Encoding of a struct in the value column: json, or avro (needs Spark's module spark-avro)."
    )
    ttl_column: str = flag(
        "",
        "Column with the TTL of each row in seconds, null = never (API V1TTL or V2; default: none expires).",
        metavar="COLUMN",
    )
    expiry_column: str = flag(
        "", "Column with the expiry of each row in seconds since the epoch, null = never.", metavar="COLUMN"
    )
    on_duplicate: Literal["error", "last"] = flag(
        "error", "For rows with the same key: error (refuse the input), or last (load the last by --order-column)."
    )
    order_column: str = flag(
        "", "Column whose largest value marks the last row of a key, with --on-duplicate last.", metavar="COLUMN"
    )
    bad_rows: str = flag(
        "",
        "Folder in which a folder gets the rows that cannot be loaded (null key or value, invalid TTL), as JSON lines (default: refuse "
        "the input).",
        metavar="DIR",
    )
    partitions: int | None = flag(
        None,
        "Number of partitions that the rows are sorted into (default: as many as Spark reads the input in).",
        limits=(1, 1_000_000),
    )
    mode: Literal["ingest", "put"] = flag(
        "ingest",
        "ingest: stores ingest SSTs. put: rows are written by RawBatchPut, as a client does, and change feeds report them.",
    )
    staging: str = flag(
        "",
        f"URL of a folder for the SSTs, which need about the space of the rows: {backup_flags.URLS} (required, but not with --mode put).",
        metavar="URL",
    )
    keep_staging: bool = flag(False, "Keep the SSTs after the load; they are a backup that `tikv-br restore` reads.")
    cluster: shared.ClusterFlags
    keyspace: str = shared.KEYSPACE()
    via: Literal["auto", "stores", "upload"] = shared.VIA()
    concurrency: int = flag(
        16,
        "Maximum number of concurrent files, with --mode put of requests.",
        shared=True,
        limits=(1, kinds.MAX_CONCURRENCY),
    )
    allow_overwrite: bool = flag(
        False,
        "Load into a range that contains data (default: refuse). Keys that are not in the input are kept.",
        command_line=True,
    )
    allow_followers: bool = shared.ALLOW_FOLLOWERS()
    checksum: bool = flag(True, "Compare the checksums of the target with the checksums of the rows.")
    rate_limit: int = shared.RATE_LIMIT()
    send_credentials: bool = shared.SEND_CREDENTIALS()
    storage_flags: backup_flags.StorageFlags
    spark: shared.SparkFlags
    resume: bool = flag(True, "Use the SSTs of an unfinished run of this command, or discard them and start over.")
    lock_wait: float = shared.LOCK_WAIT()
    dry_run: bool = shared.DRY_RUN()


@command(
    "load raw",
    example="--pd 10.0.1.1:2379 --input /lake/users.parquet --key-column id --value-column profile --staging s3://staging/load",
)
def load_raw(flags: BulkLoadFlags, context: typer.Context) -> None:
    """Load the rows of Parquet, CSV or JSON files, or of any other input that Spark reads, as SSTs or by puts, and verify the result."""
    check_settings(flags.spark.spark_master, flags.spark.combined()["spark_settings"])
    _check_mode(flags, context)
    if (flags.on_duplicate == "last") != bool(flags.order_column):
        raise UsageError(
            "--on-duplicate last and --order-column need each other",
            hint="Rows of an input have no order: name the column that orders them, such as a time or a version.",
        )
    if flags.ttl_column and flags.expiry_column:
        raise UsageError("--ttl-column cannot be used with --expiry-column", hint="Pass the one that the input has.")
    from tikv_br.tasks.inputs import CsvDialect, Input

    dialect = CsvDialect(
        flags.csv_delimiter.replace("\\t", "\t"),
        flags.csv_quote,
        flags.csv_escape,
        flags.csv_encoding,
        flags.csv_null,
    )
    source = flags.fill(
        Input,
        path=flags.input,
        format=flags.input_format,
        reader_options=_options(flags.input_option),
        csv=dialect,
    )
    source.spark_format  # noqa: B018 - refused before Spark starts
    config = flags.cluster.config()
    staging = flags.storage_flags.locate(flags.staging) if flags.staging else None
    from tikv_br.bulk_load.run import BulkLoadOptions, bulk_load
    from tikv_br.bulk_load.stage import StageOptions
    from tikv_br.restore.options import Mode, Via

    stage = flags.fill(StageOptions, input=source, clouds=flags.storage_flags.s3.clouds())
    options = flags.fill(
        BulkLoadOptions,
        cluster=config,
        staging=staging,
        stage=stage,
        mode=Mode(flags.mode),
        via=Via(flags.via),
    )
    with progress_display(flags.out) as display:
        done = bulk_load(options, display)
    flags.out.result("summary", asdict(done), _text(done))


_OF_INGEST = {
    "staging": "--staging",
    "keep_staging": "--keep-staging",
    "via": "--via",
    "resume": "--no-resume",
    "lock_wait": "--lock-wait",
    "allow_followers": "--allow-followers",
    "send_credentials": "--no-send-credentials-to-tikv",
}
"""Parameters that mean nothing to puts, and their flags."""


def _check_mode(flags: BulkLoadFlags, context: typer.Context) -> None:
    """Raise `UsageError` for flags that do not fit --mode."""
    if flags.mode == "ingest" and not flags.staging:
        raise UsageError(
            "Missing option '--staging'.", hint="Pass a folder for the SSTs, or --mode put to load without files."
        )
    if flags.mode == "put" and (extra := [said for name, said in _OF_INGEST.items() if given(context, name)]):
        raise UsageError(f"{', '.join(extra)}: not with --mode put, which writes no files", hint="Leave it out.")


def _options(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """The options of the reader. Raises `UsageError`."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, _) in zip(texts, pairs, strict=True):
        if not name or not sign:
            raise UsageError(f"--input-option {text!r} is not KEY=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def _text(done: BulkLoadSummary) -> str:
    figures = [
        ("total-take", human_seconds(done.seconds)),
        ("total-kv", f"{done.total_kvs:,}"),
        ("total-kv-size", human_bytes(done.total_bytes)),
        ("input-rows", "" if done.input_rows is None else f"{done.input_rows:,}"),
        ("bad-rows", ", ".join(f"{count:,} with {problem}" for problem, count in sorted(done.problems.items()))),
        ("hidden-files", f"{done.hidden_files:,} left out" if done.hidden_files else ""),
        ("duplicate-rows", f"{done.duplicate_rows:,}" if done.duplicate_rows else ""),
        ("duplicate-keys", ", ".join(done.duplicate_keys)),
        ("sample-keys", ", ".join(done.sample_keys)),
    ]
    if not done.dry_run:
        resumed = f" ({done.resumed_files:,} already in the target)" if done.resumed_files else ""
        figures += [
            ("average-speed", f"{human_bytes(done.average_speed)}/s"),
            ("expired", f"{done.expired_kvs:,} rows skipped" if done.expired_kvs else ""),
            ("files", f"{done.files:,}{resumed}" if done.files else "none: by puts"),
            ("checksum", f"{done.crc64xor:016x} {'equal' if done.verified else 'not compared'}"),
            ("other-rows", f"{done.other_kvs:,} other rows in the range were left alone" if done.other_kvs else ""),
        ]
    figures.append(("api-version", done.api_version))
    title = "Raw load plan (dry run: nothing was written)" if done.dry_run else "Raw load success summary"
    return listed(title, figures)
