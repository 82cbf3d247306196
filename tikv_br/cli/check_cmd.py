"""``tikv-br check``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli import options
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import OutputForm, parse_duration
from tikv_br.cli.output import Output
from tikv_br.cli.storage_flags import S3Flags
from tikv_br.errors import ProbesFailed, TikvBrError, UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.check.probe import Result
    from tikv_br.check.surroundings import CheckOptions
    from tikv_br.storage.url import StorageLocation

app = typer.Typer(rich_markup_mode=None)
COLUMNS = ("probe", "status", "seen", "what to do")


@app.command("check")
@grouped
def check_all(
    *,
    cluster: ClusterFlags,
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
    storage_flags: S3Flags,
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
        place = storage_flags.locate(storage) if storage else None
        asked = _options(cluster, place, executor, spark_master, timeout)
        if nagios:
            raise typer.Exit(_nagios(asked))
        _show(asked, Output(output))


def _options(
    cluster: ClusterFlags,
    place: StorageLocation | None,
    executor: str,
    spark_master: str,
    timeout: str,
) -> CheckOptions:
    from dataclasses import replace

    from tikv_br.check.surroundings import CheckOptions

    seconds = parse_duration(timeout)
    if seconds <= 0:
        raise UsageError("--timeout: a probe needs some time")
    config = cluster.config()
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
    Output().lines(redact(nagios.line(results)) + "\n")
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

        Output().lines(redact(unknown(str(error))) + "\n")
        raise typer.Exit(UNKNOWN) from None


def _fields(result: Result) -> dict[str, object]:
    verdict = result.verdict
    return {
        "name": result.name,
        "status": verdict.status.value,
        "seen": redact(verdict.seen),
        "advice": redact(verdict.advice),
        "figures": {figure.label: figure.value for figure in verdict.figures},
        "seconds": result.seconds,
    }


def _row(result: Result) -> tuple[str, ...]:
    verdict = result.verdict
    return result.name, verdict.status.value, redact(verdict.seen), redact(verdict.advice)
