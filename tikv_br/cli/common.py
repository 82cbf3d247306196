"""What every command takes, added in one place: ``--config``, ``--log-*``, ``--quiet``, and a variable for each flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperOption

from tikv_br.cli import log
from tikv_br.cli.coercion import quicken
from tikv_br.cli.lazy import CommandPath, leaves
from tikv_br.cli.log import LogForm
from tikv_br.cli.options import LogLevel
from tikv_br.cli.settings import ConfigFile, load, locate, options, variable
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from typer._click import Command, Context


@dataclass(slots=True)
class Invocation:
    """What is known of the running command before it has begun; the context's ``obj``."""

    file: ConfigFile | None = None
    """The config file, where there is one."""
    output: str = ""
    """The form of output that the config file asks for."""


CHECK: CommandPath = ("config", "check")
"""The command that reports mistakes in the config file instead of failing with them."""


def extend(command: Command, path: CommandPath) -> None:
    """Give a command, or each command of a group, what every command takes."""
    for leaf_path, leaf in leaves(command, path):
        leaf.no_args_is_help = False  # all of it may stand in file and environment
        have = {param.name for param in leaf.params}
        leaf.params += [param for param in _common_options() if param.name not in have]
        for flag, option in options(leaf).items():
            option.envvar = option.envvar or variable(leaf_path, flag)
        quicken(leaf)


def command_path(context: Context) -> CommandPath:
    """The words that call the context's command, without the program's name."""
    words: list[str] = []
    here: Context | None = context
    while here is not None and here.parent is not None:
        words.insert(0, str(here.info_name))
        here = here.parent
    return tuple(words)


def file_defaults(file: ConfigFile, path: CommandPath, command: Command) -> dict[str, Any]:
    """What the file says for a command, by the names of its parameters: a ``default_map``."""
    flags = options(command)
    found = {flags[flag]: setting.value for flag, setting in file.of(path, command).items()}
    return {
        option.name: [value] if option.multiple and isinstance(value, str) else value for option, value in found.items()
    }


def _use_config(context: typer.Context, named: str | None) -> None:
    """Lay the config file under the flags and variables of the command that is being read. Raises `UsageError`."""
    place, path = locate(named), command_path(context)
    if place is None:
        return
    file = load(place, context, None if path == CHECK else path[0])
    if file.problems and path != CHECK:
        raise UsageError("; ".join(file.problems), hint=f"`tikv-br {' '.join(CHECK)}` looks at variables too.")
    context.default_map = file_defaults(file, path, context.command)
    invocation = context.find_object(Invocation)
    if invocation is not None:
        invocation.file = file
        invocation.output = str(context.default_map.get("output", ""))


def _use_log_level(level: LogLevel) -> None:
    log.configure(level=level)


def _use_log_file(context: typer.Context, path: str | None) -> None:
    if not context.resilient_parsing:
        log.configure(file=path)


def _use_log_format(form: LogForm) -> None:
    log.configure(form=form)


def _use_quiet(*, quiet: bool) -> None:
    log.configure(quiet=quiet)


_carrier = typer.Typer(add_completion=False, rich_markup_mode=None)


@_carrier.command()
def _options(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            envvar="TIKV_BR_CONFIG",
            metavar="FILE",
            help="Settings under flags and variables (TOML); default: ~/.config/tikv-br/config.toml if there is one.",
            is_eager=True,
            expose_value=False,
            callback=_use_config,
        ),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level",
            envvar="TIKV_BR_LOG_LEVEL",
            help="What to log; debug adds tracebacks.",
            expose_value=False,
            callback=_use_log_level,
        ),
    ] = LogLevel.INFO,
    log_file: Annotated[
        str | None,
        typer.Option(
            "--log-file",
            envvar="TIKV_BR_LOG_FILE",
            metavar="FILE",
            help="Append the log to a file, progress and failure included; default: stderr.",
            expose_value=False,
            callback=_use_log_file,
        ),
    ] = None,
    log_format: Annotated[
        LogForm,
        typer.Option(
            "--log-format",
            envvar="TIKV_BR_LOG_FORMAT",
            help="Log lines for people, or one JSON object each.",
            expose_value=False,
            callback=_use_log_format,
        ),
    ] = LogForm.TEXT,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            envvar="TIKV_BR_QUIET",
            help="Write nothing of what goes well, as in cron: no progress, no summary. Warnings and errors are told.",
            expose_value=False,
            callback=_use_quiet,
        ),
    ] = False,
) -> None:
    """Carry the options, never called."""


def _common_options() -> list[TyperOption]:
    return [param for param in typer.main.get_command(_carrier).params if isinstance(param, TyperOption)]
