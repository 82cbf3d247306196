"""The entry point: the table of commands, and the one place where any failure becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, ClassVar, NoReturn

import typer
import typer.main

from tikv_br import run_id
from tikv_br.cli import log
from tikv_br.cli.clash import check_packages
from tikv_br.cli.coercion import quicken
from tikv_br.cli.common import Invocation, extend
from tikv_br.cli.failure import failure_of
from tikv_br.cli.lazy import LazyCommand, LazyGroup
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.process_list import hide_arguments
from tikv_br.errors import Interrupted, OutputClosed, OutputFailed, Terminated, TikvBrError, UsageError
from tikv_br.redaction import redact, secrets_in

if TYPE_CHECKING:
    from typer._click import Command

PROGRAM = "tikv-br"


class Commands(LazyGroup):
    """All commands; each help line is the first line of that module's own help (a test compares them)."""

    def load(self, name: str) -> Command:
        """Import a command and give it what every command takes."""
        command = super().load(name)
        extend(command, (name,))
        quicken(command)
        return command

    table: ClassVar[dict[str, LazyCommand]] = {
        "backup": LazyCommand("tikv_br.cli.backup_cmd", "Back up a cluster."),
        "restore": LazyCommand("tikv_br.cli.restore_cmd", "Restore a backup into a cluster."),
        "verify": LazyCommand(
            "tikv_br.cli.verify_cmd", "Check that a backup is whole, or that a cluster holds what it holds."
        ),
        "diff": LazyCommand(
            "tikv_br.cli.diff_cmd", "Find the keys that differ between two clusters, or from a backup."
        ),
        "sync": LazyCommand(
            "tikv_br.cli.sync_cmd",
            "Keep a second cluster seconds behind a first, from a backup on, until told to stop.",
        ),
        "changefeed": LazyCommand("tikv_br.cli.changefeed_cmd", "Make and look after what a group of captures syncs."),
        "capture": LazyCommand(
            "tikv_br.cli.capture_cmd", "Run and list the processes that share the work of changefeeds."
        ),
        "processor": LazyCommand("tikv_br.cli.processor_cmd", "Show who follows which sub-span of the changefeeds."),
        "check": LazyCommand(
            "tikv_br.cli.check_cmd", "Check whether cluster, storage and this machine are fit for the work."
        ),
        "list": LazyCommand("tikv_br.cli.list_cmd", "List the backups in a folder, from its index."),
        "show": LazyCommand("tikv_br.cli.show_cmd", "Show what a backup is, its ranges, or its files."),
        "cat": LazyCommand(
            "tikv_br.cli.cat_cmd",
            "Write one value out of a backup to standard output; exit code 13 when it is not there.",
        ),
        "pin": LazyCommand("tikv_br.cli.pin_cmd", "Keep a backup from being pruned."),
        "unpin": LazyCommand("tikv_br.cli.unpin_cmd", "Let a pinned backup be pruned again."),
        "prune": LazyCommand(
            "tikv_br.cli.prune_cmd", "Remove the backups that no rule keeps, for each cluster and range by itself."
        ),
        "abort": LazyCommand(
            "tikv_br.cli.abort_cmd", "Remove what an unfinished backup has left at a path; never a finished one."
        ),
        "unlock": LazyCommand(
            "tikv_br.cli.unlock_cmd", "End the lease of a run that is no more, and say whose it was."
        ),
        "drill": LazyCommand("tikv_br.cli.drill_cmd", "Rehearse a recovery, prove that it works, and report."),
        "raw": LazyCommand("tikv_br.cli.raw_cmd", "Read and write single keys and ranges of a RawKV cluster."),
        "playground": LazyCommand("tikv_br.cli.playground_cmd", "Run a development cluster on this machine."),
        "config": LazyCommand(
            "tikv_br.cli.config_cmd", "Show which settings hold and where they come from, and check the config file."
        ),
        "version": LazyCommand("tikv_br.cli.version_cmd", "Show the versions of tikv-br and what it stands on."),
    }


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Back up, migrate, restore and tail TiKV RawKV clusters."""
    if version:
        from tikv_br import __version__

        Output().result("version", {}, f"{PROGRAM} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(UsageError.exit_code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    run_id.start()
    _have_streams()
    if arguments is None:
        hide_arguments(secrets_in(" ".join(sys.argv)))
    try:
        return _run(sys.argv[1:] if arguments is None else arguments, Invocation())
    finally:
        log.reset()
        run_id.end()
        if arguments is None:
            gc.freeze()  # the process ends: its last search for garbage would cost a tenth of a second and find nothing of use


def _run(arguments: Sequence[str], invocation: Invocation) -> int:
    """Turn every failure into a message and a code. The only broad ``except`` above a Spark task's edge."""
    failure: TikvBrError
    try:
        check_packages()
        _signals_raise()
        command = typer.main.get_command(app)
        quicken(command)
        code = command.main(list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=invocation)
        Output().flush()
        return int(code or 0)
    except (TikvBrError, typer.TyperException, KeyboardInterrupt, typer.Abort) as error:
        failure = failure_of(error)
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        failure = failure_of(error)
    return _fail(failure, is_json=wants_json(arguments, invocation.output))


def wants_json(arguments: Sequence[str], configured: str = "") -> bool:
    """Whether the JSON form was asked for, also when the command line as a whole does not parse."""
    chosen = os.environ.get("TIKV_BR_OUTPUT") or configured
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--output" and index + 1 < len(arguments):
            chosen = arguments[index + 1]
        elif argument.startswith("--output="):
            chosen = argument.removeprefix("--output=")
    return chosen == OutputForm.JSON


def _fail(error: TikvBrError, *, is_json: bool) -> int:
    """Report ``error`` in the wanted form, and in the log file if there is one, and return its exit code."""
    if isinstance(error, OutputClosed):
        return error.exit_code
    if log.is_debug() and error.__traceback__ is not None:
        sys.stderr.write(redact("".join(traceback.format_exception(error))))
    if log.has_file():
        logging.getLogger(__name__).error("%s: %s (exit code %d)", error.name, error.message, error.exit_code)
    if is_json and not isinstance(error, OutputFailed):
        fields = {name: redact(value) if isinstance(value, str) else value for name, value in error.to_json().items()}
        with contextlib.suppress(OutputClosed, OutputFailed):  # the exit code still tells
            Output(OutputForm.JSON).result("exit_error", fields)
    else:
        with contextlib.suppress(OSError):
            sys.stderr.write(redact(f"Error: {error.message}") + "\n")
            if error.hint:  # by itself: the last word of a message may be the name of a credential
                sys.stderr.write(redact(f"Hint: {error.hint}") + "\n")
    return error.exit_code


def _have_streams() -> None:
    """Take /dev/null for a stream that whoever started us has closed; Python has None for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - while we live


def _signals_raise() -> None:
    """Turn SIGINT and SIGTERM into exceptions, so that everything on the stack can clean up."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted("interrupted")


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated("told to end (SIGTERM)")


if __name__ == "__main__":
    sys.exit(run())
