"""The options that only ``tikv-br drill`` has."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tikv_br.cli.option_groups import OptionGroup
from tikv_br.cli.options import parse_duration
from tikv_br.cli.secret_file import secret_of
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.drill.goals import Objectives
    from tikv_br.drill.hooks import Hooks

ReportsOption = Annotated[
    str,
    typer.Option(
        "--reports",
        envvar="TIKV_BR_REPORTS",
        metavar="URL",
        help="Folder or prefix for reports, and for what drills have made and not yet removed.",
        show_default="~/.local/state/tikv-br/drills",
    ),
]
ScenarioOption = Annotated[
    Literal["lost-cluster", "deleted-range", "corrupt-backup", "stale-safe-point"],
    typer.Option("--scenario", help="What is taken to have happened."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Which byte --scenario corrupt-backup changes.")]
KeepLastOption = Annotated[
    int,
    typer.Option(
        "--keep-last",
        min=0,
        metavar="N",
        help="Remove reports, and backups that drills made, but for N drills; 0: none.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalFlags(OptionGroup):
    """What is asked of the recovery."""

    rpo: Annotated[str, typer.Option("--rpo", metavar="TIME", help="How much of the last writes may be lost.")] = ""
    rto: Annotated[
        str, typer.Option("--rto", metavar="TIME", help="How long it may take to have proven data back.")
    ] = ""
    max_age: Annotated[str, typer.Option("--max-age", metavar="TIME", help="How old the backup may be.")] = ""
    min_keys: Annotated[
        int | None, typer.Option("--min-keys", min=0, metavar="N", help="How many keys there must be afterwards.")
    ] = None
    cut_over: Annotated[
        str, typer.Option("--cut-over", metavar="TIME", help="How long nobody may write, when clients move over.")
    ] = ""

    def objectives(self) -> Objectives:
        """What they say. Raises `typer.BadParameter`."""
        from tikv_br.drill.goals import Objectives

        said = {"--rpo": self.rpo, "--rto": self.rto, "--max-age": self.max_age, "--cut-over": self.cut_over}
        rpo, rto, max_age, cut_over = (_seconds(flag, text) if text else None for flag, text in said.items())
        return Objectives(rpo, rto, max_age, self.min_keys, cut_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFlags(OptionGroup):
    """Whom to tell."""

    heartbeat_url: Annotated[
        str, typer.Option("--heartbeat-url", metavar="URL", help="Is fetched after a drill that has passed.")
    ] = ""
    webhook_url: Annotated[
        str,
        typer.Option("--webhook-url", metavar="URL", help="Gets each drill's verdict and figures, by POST as JSON."),
    ] = ""
    heartbeat_url_file: Annotated[
        str, typer.Option("--heartbeat-url-file", metavar="FILE", help="File that holds the URL of the heartbeat.")
    ] = ""
    webhook_url_file: Annotated[
        str, typer.Option("--webhook-url-file", metavar="FILE", help="File that holds the URL of the webhook.")
    ] = ""
    textfile: Annotated[
        str, typer.Option("--textfile", metavar="FILE", help="Written for node_exporter's textfile collector; *.prom.")
    ] = ""
    on_end: Annotated[
        str,
        typer.Option(
            "--on-end", metavar="COMMAND", help="Run after each drill, with TIKV_BR_DRILL_* in its environment."
        ),
    ] = ""

    def hooks(self) -> Hooks:
        """Whom they name. Raises `UsageError`."""
        from tikv_br.drill.hooks import Hooks

        try:
            command = tuple(shlex.split(self.on_end))
        except ValueError as error:
            raise UsageError(f"--on-end does not read as a command: {error}") from None
        heartbeat = secret_of("--heartbeat-url", self.heartbeat_url, self.heartbeat_url_file)
        webhook = secret_of("--webhook-url", self.webhook_url, self.webhook_url_file)
        return Hooks(heartbeat, webhook, self.textfile, command)


def _seconds(flag: str, text: str) -> float:
    try:
        return parse_duration(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=flag) from None


def reports_url(said: str) -> str:
    """The place that ``--reports`` names, or the user's own."""
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return said or str(Path(state_home).expanduser().absolute() / "tikv-br" / "drills")
