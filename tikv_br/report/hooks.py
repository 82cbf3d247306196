"""Notifies others of the end of a command: heartbeat, webhook, textfile for Prometheus, programs. Failures are warnings."""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tikv_br.errors import UsageError
from tikv_br.redaction import visible
from tikv_br.retry import in_background
from tikv_br.storage.crypter import SecretText

PATIENCE = 20.0
"""Seconds that a server may be silent; twice as many for the whole request."""
NO_ANSWER = "timeout"
COMMAND_SECONDS = 300.0
METRIC = "tikv_br_command"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Notifications at the end of a command; empty = none. URLs may contain secrets and are never shown."""

    heartbeat: SecretText = field(default_factory=SecretText)
    """Requested after a success, and only then: a missing request is the alarm."""
    webhook: SecretText = field(default_factory=SecretText)
    """Receives the figures of every run, as JSON."""
    textfile: str = ""
    """File for node_exporter's textfile collector; replaced as a whole."""
    command: tuple[str, ...] = ()
    """Program and arguments, run without a shell after every run, with the figures in its environment."""
    on_failure: tuple[str, ...] = ()
    """The same, only after a failure."""

    def check(self) -> None:
        """Raise `UsageError` for a hook that cannot work."""
        for flag, url in (("--heartbeat-url", self.heartbeat), ("--webhook-url", self.webhook)):
            if url and not _is_url(url.reveal()):
                raise UsageError(f"{flag} must be an http:// or https:// URL")
        if self.textfile and not Path(self.textfile).absolute().parent.is_dir():
            raise UsageError(f"--textfile: the directory of {self.textfile} does not exist")

    def run(
        self,
        figures: Mapping[str, object],
        prefix: str,
        write_metrics: Callable[[Path], None],
        *,
        succeeded: bool,
    ) -> list[str]:
        """Run all hooks and return what failed; a failed one does not affect the others.

        ``figures`` are the body of the webhook, and the environment of programs, with ``prefix`` before their names.
        """
        actions: list[tuple[str, bool, Callable[[], None]]] = [
            ("the textfile", bool(self.textfile), lambda: write_metrics(Path(self.textfile))),
            ("the webhook", bool(self.webhook), lambda: _send(self.webhook, figures)),
            ("the heartbeat", bool(self.heartbeat) and succeeded, lambda: _send(self.heartbeat)),
            ("the command", bool(self.command), lambda: _run(self.command, prefix, figures)),
            (
                "the command of --on-failure",
                bool(self.on_failure) and not succeeded,
                lambda: _run(self.on_failure, prefix, figures),
            ),
        ]
        problems = []
        for name, enabled, act in actions:
            try:
                if enabled:
                    act()
            except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
                problems.append(f"{name} failed: {_reason(error)}")
                log.warning(problems[-1])
        return problems


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended, for its hooks."""

    command: str
    exit_code: int
    started: float
    """Seconds since the epoch."""
    seconds: float
    message: str = ""
    """Message of the failure; ``""`` = none."""
    hint: str = ""
    summary: Mapping[str, object] = field(default_factory=dict)
    """The fields of the command's ``summary`` in JSON; empty if it failed before."""

    def notify(self, hooks: Hooks) -> list[str]:
        """Run hooks. Returns what failed."""
        figures = {
            **self.summary,
            "command": self.command,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "message": self.message,
            "hint": self.hint,
        }
        return hooks.run(figures, "TIKV_BR_HOOK_", self._write_metrics, succeeded=self.exit_code == 0)

    def _write_metrics(self, path: Path) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        from tikv_br.web.metrics import read_textfile, write_textfile

        registry, end = CollectorRegistry(), self.started + self.seconds
        last_success = f"{METRIC}_last_success_timestamp_seconds"
        earlier = read_textfile(path).get((last_success, self.command))

        def gauge(name: str, text: str, value: float) -> None:
            Gauge(name, text, ("command",), registry=registry).labels(self.command).set(value)

        gauge(f"{METRIC}_success", "Whether the last run succeeded.", float(self.exit_code == 0))
        gauge(f"{METRIC}_exit_code", "Exit code of the last run.", self.exit_code)
        gauge(f"{METRIC}_end_timestamp_seconds", "When the last run ended.", end)
        gauge(f"{METRIC}_duration_seconds", "How long the last run took.", self.seconds)
        succeeded = end if self.exit_code == 0 else earlier
        if succeeded is not None:
            gauge(last_success, "When the last run that succeeded ended.", succeeded)
        for name, text in (("total_kvs", "Rows of the last run."), ("total_bytes", "Bytes of keys and values.")):
            value = self.summary.get(name)
            if isinstance(value, int):
                gauge(f"{METRIC}_{name.removeprefix('total_')}", text, value)
        write_textfile(path, registry)


def _is_url(text: str) -> bool:
    """Return whether a text is a URL that can be requested. Messages must not contain it."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and text.isprintable() and " " not in text


def _send(url: SecretText, body: Mapping[str, object] | None = None) -> None:
    """POST a body as JSON, or GET without one. The whole request has a deadline: a server may send a byte now and then."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url.reveal(), data, headers)  # noqa: S310 - the scheme was checked

    def send() -> None:
        with urllib.request.urlopen(request, timeout=PATIENCE):  # noqa: S310
            pass

    def watch(began: float) -> None:
        if time.monotonic() - began > 2 * PATIENCE:
            raise TimeoutError(NO_ANSWER)

    in_background(send, "hook", watch)


def _run(command: tuple[str, ...], prefix: str, body: Mapping[str, object]) -> None:
    figures = {f"{prefix}{name.upper()}": _text(value) for name, value in body.items()}
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **figures},
        timeout=COMMAND_SECONDS,
        check=True,
    )


def _text(value: object) -> str:
    """Format a figure as an environment variable; empty if not measured. Messages may repeat names from files of others."""
    if isinstance(value, tuple):
        return visible(", ".join(value))
    return "" if value is None else visible(str(value))


def _reason(error: Exception) -> str:
    """The reason, without the URL or the arguments, which may contain secrets."""
    match error:
        case urllib.error.HTTPError():
            return f"HTTP status {error.code}"
        case urllib.error.URLError(reason=TimeoutError()) | TimeoutError():
            return NO_ANSWER
        case urllib.error.URLError():
            return str(error.reason)
        case subprocess.CalledProcessError():
            return f"exit code {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"timeout after {error.timeout:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return type(error).__name__
