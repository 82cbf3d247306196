"""The entry point: the table of commands, and the place where every failure becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import typer
import typer.main

from tikv_br import pandas_import, run_id, signals
from tikv_br.cli import log
from tikv_br.cli.command import LazyCommand, LazyGroup
from tikv_br.cli.output import Output, OutputForm, drop_unwritten, failure_of
from tikv_br.cli.settings import Invocation
from tikv_br.environment import drop_foreign_variables
from tikv_br.errors import Failure, OutputClosed, OutputFailed, UsageError
from tikv_br.redaction import redact, secrets_in, visible, visible_lines

PROGRAM = "tikv-br"


class Commands(LazyGroup):
    """All commands. Each help line is the first line of the help of the command (a test compares them)."""

    table: ClassVar[dict[str, LazyCommand]] = {
        name: LazyCommand(tuple(f"tikv_br.cli.{each}_cmd" for each in modules.split()), text, panel)
        for panel, commands in {
            "Protect": (
                ("backup", "backup backups show", "Back up a cluster, and look after its backups."),
                ("log", "log", "Archive all changes of a cluster, for point-in-time recovery."),
                (
                    "prune",
                    "backups",
                    "Remove the backups that no --keep-* option keeps; at least one is required. Each cluster and range is pruned separately.",
                ),
            ),
            "Recover": (
                ("restore", "restore", "Restore a backup into a cluster."),
                ("load", "load", "Load files or tables into a cluster."),
                ("drill", "drill", "Rehearse recoveries, measure them, and report."),
            ),
            "Replicate": (
                ("sync", "sync", "Replicate changes to another cluster or a file, until stopped."),
                (
                    "changefeed",
                    "changefeed capture",
                    "Manage changefeeds: syncs that several capture processes run together.",
                ),
                ("kafka", "kafka", "Apply changes in Kafka to a cluster."),
            ),
            "Inspect": (
                ("list", "backups", "List the backups below a URL."),
                ("show", "show", "Show the summary, the ranges or the files of a backup."),
                ("cat", "show", "Print the value of a key in a backup. Exit code 13 if it has no such key."),
                ("verify", "verify", "Verify backups, or compare a cluster with them."),
                ("diff", "diff", "Compare two clusters, or a cluster with a backup."),
                ("export", "export", "Export rows of a cluster or a backup as Parquet, CSV or JSON lines."),
            ),
            "Operate": (
                ("check", "check", "Run preflight checks on the cluster, the storage and this machine."),
                ("gc", "gc", "Run garbage collection of old versions, and show what holds it back."),
                (
                    "serve",
                    "serve",
                    "Serve a read-only web page of backups, log archives, syncs, drills and garbage collection, until stopped.",
                ),
                ("raw", "raw", "Read and write keys and ranges of a RawKV cluster."),
                ("spark", "spark", "Prepare Spark clusters."),
                ("config", "config", "Show effective settings, write a config file and check it."),
                ("version", "config", "Show the versions of tikv-br and of its main dependencies."),
                ("help", "config", "Show the help of a command, or of a topic such as storage."),
            ),
            "Try": (
                ("playground", "playground", "Run an emulator of PD and TiKV on this machine, for tests and demos."),
            ),
            "": (  # former names, which the next version no longer has
                ("pin", "backups", "Protect a backup from prune."),
                ("unpin", "backups", "Allow prune to remove a pinned backup again."),
                (
                    "delete",
                    "backups",
                    "Delete one complete backup. Fails if it is pinned, or the base of an incremental one.",
                ),
                ("abort", "backups", "Remove an unfinished backup. Fails if the backup is complete."),
                ("unlock", "backups", "Remove the lock that a dead run left in a backup, and show its owner."),
                (
                    "find",
                    "show",
                    "Show which backups have a key, newest first, with the size and the hash of its value. Exit code 13 if none has it.",
                ),
                ("capture", "capture", "Run and list captures, the processes that run changefeeds."),
                ("processor", "capture", "Show which capture runs which part of each changefeed."),
            ),
        }.items()
        for name, modules, text in commands
    }


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="`tikv-br help COMMAND` and `tikv-br COMMAND --help` show the options of a command, `tikv-br help storage` the URLs and credentials of storage. Options of all commands, before or after the command: --output json, --config FILE, --log-level LEVEL, --log-file FILE, --log-format json, --quiet.\n\nDURATION: 500ms, 90s, 1h30m or plain seconds. SIZE: 4096, 64KiB, 1GiB (powers of 1024). TIME: 2026-05-02T10:00:00Z, 2026-05-02 10:00:00 (UTC), -2m or 2 minutes ago.",
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Back up, migrate, restore and replicate TiKV RawKV clusters."""
    if version:
        from tikv_br import __version__

        Output().result("version", {}, f"{PROGRAM} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(UsageError.exit_code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if arguments is None:
        pandas_import.keep_out()
    run_id.start()
    _prepare_streams()
    ignored = drop_foreign_variables()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(words, Invocation(has_secrets=bool(secrets_in(" ".join(words))), ignored=ignored))
    finally:
        log.reset()
        run_id.end()
        drop_unwritten(sys.stderr)
        if arguments is None:
            gc.freeze()  # else the interpreter looks through all objects once more before it ends


def _run(arguments: Sequence[str], invocation: Invocation) -> int:
    """Turn every failure into a message and a code. The only broad ``except`` above a Spark task's edge."""
    failure: Failure
    try:
        signals.raise_from_now()
        command = typer.main.get_command(app)
        code = command.main(list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=invocation)
        Output().flush()
        return int(code or 0)
    except (Failure, typer.TyperException, KeyboardInterrupt, typer.Abort) as error:
        failure = failure_of(error)
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        failure = failure_of(error)
    return _fail(failure, is_json=wants_json(arguments, invocation.output))


def wants_json(arguments: Sequence[str], configured: str = "") -> bool:
    """Whether JSON output was requested, even if the command line is not valid."""
    chosen = os.environ.get("TIKV_BR_OUTPUT") or configured
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--output" and index + 1 < len(arguments):
            chosen = arguments[index + 1]
        elif argument.startswith("--output="):
            chosen = argument.removeprefix("--output=")
    return chosen == OutputForm.JSON


def _fail(error: Failure, *, is_json: bool) -> int:
    """Report `error` in the output format, and in the log file if there is one. Returns its exit code."""
    if isinstance(error, OutputClosed):
        return error.exit_code
    if log.is_debug() and error.__traceback__ is not None:
        sys.stderr.write(visible_lines(redact("".join(traceback.format_exception(error)))))
    if log.has_file():
        logging.getLogger(__name__).error("%s: %s (exit code %d)", error.name, error.message, error.exit_code)
    if is_json and not isinstance(error, OutputFailed):
        fields = {name: redact(value) if isinstance(value, str) else value for name, value in error.to_json().items()}
        with contextlib.suppress(OutputClosed, OutputFailed):  # the exit code still reports the failure
            Output(OutputForm.JSON).result("exit_error", fields)
    else:
        with contextlib.suppress(OSError):
            sys.stderr.write(visible(redact(f"Error: {error.message}")) + "\n")
            if error.hint:  # redacted separately: the last word of a message may be the name of a credential
                sys.stderr.write(visible(redact(f"Hint: {error.hint}")) + "\n")
    return error.exit_code


def _prepare_streams() -> None:
    """Open /dev/null for standard streams that were closed at the start, which Python sets to None.

    Characters that the others cannot encode, as if the locale is C, are written as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - while we live
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(run())
