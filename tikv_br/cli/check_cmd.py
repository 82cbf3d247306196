"""``tikv-br check``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli import log, options
from tikv_br.cli.options import OutputForm, parse_duration
from tikv_br.cli.output import Output
from tikv_br.cli.storage_location import storage_location
from tikv_br.errors import ProbesFailed, TikvBrError, UsageError

if TYPE_CHECKING:
    from tikv_br.check.probe import Result
    from tikv_br.check.surroundings import CheckOptions
    from tikv_br.storage.url import StorageLocation

app = typer.Typer(rich_markup_mode=None)
COLUMNS = ("probe", "status", "seen", "what to do")


@app.command("check")
def check_all(
    pd: options.PdOption = options.DEFAULT_PD,
    ca: options.CaOption = None,
    cert: options.CertOption = None,
    key: options.KeyOption = None,
    storage: Annotated[
        str,
        typer.Option(
            "--storage",
            "-s",
            envvar="TIKV_BR_STORAGE",
            metavar="URL",
            help="Also check a place for backups: by objects below tikv-br-check/, which are removed.",
        ),
    ] = "",
    s3_endpoint: options.S3EndpointOption = None,
    s3_region: options.S3RegionOption = None,
    s3_storage_class: options.S3StorageClassOption = None,
    s3_sse: options.S3SseOption = None,
    s3_sse_kms_key_id: options.S3SseKmsKeyOption = None,
    s3_acl: options.S3AclOption = None,
    s3_provider: options.S3ProviderOption = None,
    s3_force_path_style: options.S3PathStyleOption = None,
    executor: Annotated[
        options.ExecutorName,
        typer.Option(
            "--executor",
            envvar="TIKV_BR_EXECUTOR",
            help="Where work will run; spark: start it and run a task.",
        ),
    ] = "auto",
    spark_master: options.SparkMasterOption = "local[*]",
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long a probe may take.")] = "10s",
    nagios: Annotated[
        bool, typer.Option("--nagios", help="One line for Nagios; exit code 0 OK, 1 warning, 2 critical, 3 unknown.")
    ] = False,
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Check whether cluster, storage and this machine are fit for the work."""
    with _unknown_in_one_line(nagios):
        place = (
            storage_location(
                storage,
                endpoint=s3_endpoint,
                region=s3_region,
                storage_class=s3_storage_class,
                sse=s3_sse,
                sse_kms_key_id=s3_sse_kms_key_id,
                acl=s3_acl,
                provider=s3_provider,
                force_path_style=s3_force_path_style,
            )
            if storage
            else None
        )
        asked = _options(pd, (ca, cert, key), place, executor, spark_master, timeout)
        if nagios:
            raise typer.Exit(_nagios(asked))
        _show(asked, Output(output))


def _options(
    pd: list[str],
    tls: tuple[str | None, str | None, str | None],
    place: StorageLocation | None,
    executor: str,
    spark_master: str,
    timeout: str,
) -> CheckOptions:
    from dataclasses import replace

    from tikv_br.check.surroundings import CheckOptions
    from tikv_br.cluster.config import ClusterConfig

    seconds = parse_duration(timeout)
    if seconds <= 0:
        raise UsageError("--timeout: a probe needs some time")
    ca, cert, key = tls
    config = ClusterConfig.from_flags(pd, ca=ca, cert=cert, key=key)
    # A probe asks once more after a failure, and is not to be cut off by its own time before it can say what failed.
    short = replace(
        config,
        connect_timeout=min(config.connect_timeout, seconds / 2),
        request_timeout=seconds / 2,
        retry_budget=seconds / 4,
        busy_budget=0.0,
    )
    return CheckOptions(short, place, executor, spark_master, seconds)


def _show(asked: CheckOptions, out: Output) -> None:
    """Tell what was found, as it comes in JSON, else in a table. Raises `ProbesFailed`."""
    from tikv_br.check.probe import Status
    from tikv_br.check.run import check, count

    results = check(asked, lambda result: out.result("probe", _fields(result)))
    out.table(COLUMNS, [_row(result) for result in results])
    counted = count(results)
    text = ", ".join(f"{number} {status.value}" for status, number in counted.items() if number)
    figures = {
        "ok": counted[Status.OK],
        "warn": counted[Status.WARN],
        "fail": counted[Status.FAIL],
        "skipped": counted[Status.SKIPPED],
    }
    out.result("summary", figures, text)
    if failed := [result.name for result in results if result.verdict.status is Status.FAIL]:
        raise ProbesFailed(f"{len(failed)} of {len(results)} probes failed: {', '.join(failed)}")


def _nagios(asked: CheckOptions) -> int:
    from tikv_br.check import nagios
    from tikv_br.check.run import check

    results = check(asked)
    Output().lines(log.redact(nagios.line(results)) + "\n")
    return nagios.state(results)


@contextlib.contextmanager
def _unknown_in_one_line(nagios: bool) -> Iterator[None]:
    """Where a plug-in was asked for, tell in its way that nothing could be checked."""
    try:
        yield
    except (TikvBrError, typer.BadParameter) as error:
        if not nagios:
            raise
        from tikv_br.check.nagios import UNKNOWN, unknown

        Output().lines(log.redact(unknown(str(error))) + "\n")
        raise typer.Exit(UNKNOWN) from None


def _fields(result: Result) -> dict[str, object]:
    verdict = result.verdict
    return {
        "name": result.name,
        "status": verdict.status.value,
        "seen": log.redact(verdict.seen),
        "advice": log.redact(verdict.advice),
        "figures": {figure.label: figure.value for figure in verdict.figures},
        "seconds": result.seconds,
    }


def _row(result: Result) -> tuple[str, ...]:
    verdict = result.verdict
    return result.name, verdict.status.value, log.redact(verdict.seen), log.redact(verdict.advice)
