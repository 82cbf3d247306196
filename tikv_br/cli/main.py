"""The entry point: the table of commands, and the one place where any failure becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, ClassVar, NoReturn

import typer
import typer.main

from tikv_br.cli.clash import check_packages
from tikv_br.cli.lazy import LazyCommand, LazyGroup
from tikv_br.cli.log import is_debug, redact
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output
from tikv_br.errors import Interrupted, OutputClosed, Terminated, TikvBrError, UsageError

PROGRAM = "tikv-br"


class Commands(LazyGroup):
    """All commands; each help line is the first line of that module's own help (a test compares them)."""

    table: ClassVar[dict[str, LazyCommand]] = {
        "backup": LazyCommand("tikv_br.cli.backup_cmd", "Back up a cluster."),
        "restore": LazyCommand("tikv_br.cli.restore_cmd", "Restore a backup into a cluster."),
        "verify": LazyCommand(
            "tikv_br.cli.verify_cmd", "Check that a backup is whole, or that a cluster holds what it holds."
        ),
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
        "raw": LazyCommand("tikv_br.cli.raw_cmd", "Read and write single keys and ranges of a RawKV cluster."),
        "playground": LazyCommand("tikv_br.cli.playground_cmd", "Run a development cluster on this machine."),
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
    """Run the command line and return its exit code. The only broad ``except`` above a Spark task's edge."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        check_packages()
        _signals_raise()
        code = typer.main.get_command(app).main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        Output().flush()
        return int(code or 0)
    except TikvBrError as error:
        return _fail(error, arguments)
    except typer.TyperException as error:
        return _fail(_usage_error(error), arguments)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(Interrupted("interrupted"), arguments)
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        return _fail(TikvBrError(f"unexpected {type(error).__name__}: {error}"), arguments)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the JSON form was asked for, also when the command line as a whole does not parse."""
    chosen = os.environ.get("TIKV_BR_OUTPUT", "")
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--output" and index + 1 < len(arguments):
            chosen = arguments[index + 1]
        elif argument.startswith("--output="):
            chosen = argument.removeprefix("--output=")
    return chosen == OutputForm.JSON


def _fail(error: TikvBrError, arguments: Sequence[str]) -> int:
    """Report ``error`` in the wanted form and return its exit code."""
    if isinstance(error, OutputClosed):
        return error.exit_code
    if is_debug() and error.__traceback__ is not None:
        sys.stderr.write(redact("".join(traceback.format_exception(error))))
    if wants_json(arguments):
        fields = {name: redact(value) if isinstance(value, str) else value for name, value in error.to_json().items()}
        with contextlib.suppress(OutputClosed):  # the exit code still tells
            Output(OutputForm.JSON).row(fields, "")
    else:
        sys.stderr.write(redact(f"Error: {error.message}\n") + (f"Hint: {error.hint}\n" if error.hint else ""))
    return error.exit_code


def _usage_error(error: typer.TyperException) -> UsageError:
    """Our form of what Typer found wrong with the command line."""
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"See `{context.command_path} --help`." if context is not None else None
    return UsageError(error.format_message(), hint=hint)


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
