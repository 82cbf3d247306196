"""Whom a drill tells how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tikv_br.errors import UsageError
from tikv_br.storage.secret import SecretText


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom to tell; empty = nobody. URLs may hold secrets, and are never shown."""

    heartbeat: SecretText = field(default_factory=SecretText)
    """Is asked for after a drill that has passed, and at no other time: its silence is the alarm."""
    webhook: SecretText = field(default_factory=SecretText)
    """Gets the verdict and figures of every drill, as JSON."""
    textfile: str = ""
    """For node_exporter's textfile collector: replaced as a whole."""
    command: tuple[str, ...] = ()
    """Program and arguments, run without a shell; the figures are in its environment."""

    def check(self) -> None:
        """Raise `UsageError` for what cannot work."""
        for flag, url in (("--heartbeat-url", self.heartbeat), ("--webhook-url", self.webhook)):
            if url and not _is_url(url.reveal()):
                raise UsageError(f"{flag} wants an http:// or https:// URL")
        if self.textfile and not Path(self.textfile).absolute().parent.is_dir():
            raise UsageError(f"--textfile: the folder of {self.textfile} does not exist")


def _is_url(text: str) -> bool:
    """Whether it is a URL that can be asked for; its text is never in a message."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and text.isprintable() and " " not in text
