"""Flags of the status of a command that runs until it is stopped: its address and key, and how often it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tikv_br.cli import kinds, shared
from tikv_br.cli.command import Flags, flag
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.storage.crypter import SecretText
    from tikv_br.web.address import Address

SHORTEST_STATUS = 0.1


class ServerFlags(Flags):
    status_addr: str = flag(
        "", "Serve /status, /healthz and /metrics at this address (default host: 127.0.0.1).", metavar="[HOST:]PORT"
    )
    status_key_file: str = flag(
        "",
        "File with the bearer token for /status and /metrics (default: ~/.local/state/tikv-br/status.key, created on first use).",
        metavar="FILE",
    )
    no_status_key: bool = flag(False, "Serve /status and /metrics without a token.")

    def check(self) -> None:
        """Check the flags before any connection is made. Raises `UsageError`."""
        if self.address() is not None:
            self.key_file()

    def address(self) -> Address | None:
        """The address to serve at; None = do not serve. Raises `UsageError`."""
        if not self.status_addr:
            return None
        from tikv_br.web.address import Address

        return Address.parse(self.status_addr)

    def key_file(self) -> Path | None:
        """The file of the key; None = no key. Raises `UsageError`."""
        if self.no_status_key and self.status_key_file:
            raise UsageError("--no-status-key and --status-key-file cannot be combined")
        if self.no_status_key:
            return None
        return Path(self.status_key_file) if self.status_key_file else shared.state_path("status.key")

    def key(self) -> SecretText:
        """The key; empty = none. Raises `UsageError`, `StorageError`."""
        from tikv_br.web.address import load_or_create_key, read_key
        from tikv_br.web.status import NO_KEY

        path = self.key_file()
        if path is None:
            return NO_KEY
        return read_key(path) if self.status_key_file else load_or_create_key(path)


class StatusFlags(ServerFlags):
    status_every: float = flag(
        "10s",
        "Interval between status lines on stderr, in --log-file or as JSON. A terminal shows the status live.",
        kind=kinds.TIME,
    )
    status_addr: str = flag(
        "",
        "Serve /status, /healthz and /metrics at this address (default host: 127.0.0.1).",
        metavar="[HOST:]PORT",
    )
    max_lag: float = flag("5m", "Checkpoint lag above which /healthz and metrics report unhealthy.", kind=kinds.TIME)

    def check(self) -> None:
        """Check the flags before any connection is made. Raises `UsageError`."""
        if self.status_every < SHORTEST_STATUS:
            raise UsageError(f"--status-every is too short: pass at least {SHORTEST_STATUS:g}s")
        ServerFlags.check(self)
