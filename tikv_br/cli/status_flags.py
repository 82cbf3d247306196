"""The options of commands that run syncs: how they tell how it goes, and to whom."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.option_groups import OptionGroup
from tikv_br.cli.options import parse_duration
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.watch.address import Address
    from tikv_br.storage.secret import SecretText

SHORTEST_STATUS = 0.1
StatusEveryOption = Annotated[
    float,
    typer.Option(
        "--status-every",
        parser=parse_duration,
        metavar="TIME",
        show_default="10s",
        help="How often to say how it goes, in the log or as a JSON line; a terminal shows it live.",
    ),
]
StatusAddrOption = Annotated[
    str,
    typer.Option(
        "--status-addr",
        metavar="[HOST:]PORT",
        help="Serve a page, /status, /healthz and /metrics there; without a host, to this machine only.",
    ),
]
StatusKeyFileOption = Annotated[
    str,
    typer.Option(
        "--status-key-file",
        metavar="FILE",
        help="The key that figures are told for; by default one of this user's, which is made where it is missing.",
    ),
]
NoStatusKeyOption = Annotated[
    bool, typer.Option("--no-status-key", help="Tell figures to everyone who reaches --status-addr.")
]
MaxLagOption = Annotated[
    float,
    typer.Option(
        "--max-lag",
        parser=parse_duration,
        metavar="TIME",
        show_default="5m",
        help="How far behind a sync is still called healthy.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFlags(OptionGroup):
    """How to tell how it goes."""

    status_every: StatusEveryOption = 10.0
    status_addr: StatusAddrOption = ""
    status_key_file: StatusKeyFileOption = ""
    no_status_key: NoStatusKeyOption = False
    max_lag: MaxLagOption = 300.0

    def check(self) -> None:
        """Refuse what cannot be, before anything is asked. Raises `UsageError`."""
        if self.status_every < SHORTEST_STATUS:
            raise UsageError(f"--status-every is too short: at least {SHORTEST_STATUS:g} s")
        if self.address() is not None:
            self.key_file()

    def address(self) -> Address | None:
        """Where to serve it, if anywhere. Raises `UsageError`."""
        if not self.status_addr:
            return None
        from incremental.watch.address import Address

        return Address.parse(self.status_addr)

    def key_file(self) -> Path | None:
        """Where the key is; None = there is none. Raises `UsageError`."""
        if self.no_status_key and self.status_key_file:
            raise UsageError("--no-status-key and --status-key-file exclude each other")
        if self.no_status_key:
            return None
        return Path(self.status_key_file) if self.status_key_file else _own_key_file()

    def key(self) -> SecretText:
        """The key itself, empty = none. Raises `UsageError`, `StorageError`."""
        from incremental.watch.key import own_key, read_key
        from incremental.watch.server import NO_KEY

        path = self.key_file()
        if path is None:
            return NO_KEY
        return read_key(path) if self.status_key_file else own_key(path)


def _own_key_file() -> Path:
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser().absolute() / "tikv-br" / "status.key"
