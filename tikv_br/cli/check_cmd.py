"""``tikv-br check``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

import typer
from msgspec.structs import replace

from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import command, flag
from tikv_br.cli.output import Output
from tikv_br.errors import ProbesFailed, TikvBrError, UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.check.probe import CheckOptions, Result

COLUMNS = ("probe", "status", "result", "what to do")


NAGIOS = partial(flag, False, "Print one line for Nagios; exit code 0 OK, 1 warning, 2 critical, 3 unknown.")


class ProbedSparkFlags(shared.SparkFlags):
    executor: Literal["auto", "driver", "spark"] = flag(
        "auto", "Where tasks will run; spark: start Spark and run a task.", shared=True
    )


class CheckFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    storage: str = backup_flags.storage(
        "Also check this storage URL, with temporary objects below tikv-br-check/.", default=""
    )
    s3: backup_flags.S3Flags
    send_credentials: bool = shared.SEND_CREDENTIALS()
    spark: ProbedSparkFlags
    timeout: str = flag("10s", "Maximum time per probe.", metavar="DURATION")
    nagios: bool = NAGIOS()


@command("check", example="--pd 10.0.0.1:2379 --storage s3://backups")
def check_all(flags: CheckFlags) -> None:
    """Run preflight checks on the cluster, the storage and this machine."""
    with unknown_in_one_line(flags.nagios):
        options = _options(flags)
        if flags.nagios:
            from tikv_br.check.run import check

            exit_as_plugin(check(options))
        _show(options, flags.out)


def _options(flags: CheckFlags) -> CheckOptions:
    from tikv_br.check.probe import CheckOptions
    from tikv_br.tasks.executor import ExecutorOptions

    place = flags.s3.locate(flags.storage) if flags.storage else None
    seconds = kinds.parse_duration(flags.timeout)
    if seconds <= 0:
        raise UsageError("--timeout must be greater than 0")
    config = flags.cluster.config()
    # Limits are below --timeout, so that a probe can retry once and still report what failed.
    short = replace(
        config,
        connect_timeout=min(config.connect_timeout, seconds / 2),
        request_timeout=seconds / 2,
        retry_budget=seconds / 4,
        busy_budget=0.0,
    )
    tasks = flags.fill(ExecutorOptions)
    return CheckOptions(short, place, tasks, seconds, send_credentials=flags.send_credentials)


def _show(asked: CheckOptions, out: Output) -> None:
    """Print results: in JSON as they arrive, else in a table. Raises `ProbesFailed`."""
    from tikv_br.check.probe import Status
    from tikv_br.check.run import check, count

    results = check(asked, lambda result: out.result("probe", _fields(result)))
    out.table(COLUMNS, [_row(result) for result in results], prose=("result", "what to do"))
    counted = count(results)
    text = ", ".join(f"{number} {status.value}" for status, number in counted.items() if number)
    figures = {
        "ok": counted[Status.OK],
        "warn": counted[Status.WARN],
        "fail": counted[Status.FAIL],
        "skipped": counted[Status.SKIPPED],
    }
    out.result("summary", figures, text)
    if failed := [result.name for result in results if result.outcome.status is Status.FAIL]:
        raise ProbesFailed(f"{len(failed)} of {len(results)} probes failed: {', '.join(failed)}")


def exit_as_plugin(results: Sequence[Result]) -> NoReturn:
    """Print the line for Nagios, and exit with its code."""
    from tikv_br.check.run import line, state

    Output().lines(redact(line(results)) + "\n")
    raise typer.Exit(state(results))


@contextlib.contextmanager
def unknown_in_one_line(nagios: bool) -> Iterator[None]:
    """Report errors as the state UNKNOWN in one line, if `nagios`."""
    try:
        yield
    except (TikvBrError, typer.BadParameter) as error:
        if not nagios:
            raise
        from tikv_br.check.run import UNKNOWN, unknown

        Output().lines(redact(unknown(str(error))) + "\n")
        raise typer.Exit(UNKNOWN) from None


def _fields(result: Result) -> dict[str, object]:
    outcome = result.outcome
    return {
        "name": result.name,
        "status": outcome.status.value,
        "seen": redact(outcome.seen),
        "advice": redact(outcome.advice),
        "figures": {figure.label: figure.value for figure in outcome.figures},
        "seconds": result.seconds,
    }


def _row(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    return result.name, outcome.status.value, redact(outcome.seen), redact(outcome.advice)
