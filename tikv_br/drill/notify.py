"""Notifies others of the end of a drill: heartbeat, webhook, textfile for Prometheus, command. Failures are warnings."""

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
from dataclasses import asdict, dataclass
from pathlib import Path

from tikv_br.drill.options import Hooks
from tikv_br.drill.report import DrillReport
from tikv_br.errors import ObjectivesMissed
from tikv_br.patience import in_background
from tikv_br.report.facts import DrillVerdict
from tikv_br.storage.crypter import SecretText

PATIENCE = 20.0
"""Seconds that a server may be silent; twice as many for the whole request."""
NO_ANSWER = "timeout"
COMMAND_SECONDS = 300.0
METRIC = "tikv_br_drill"
log = logging.getLogger(__name__)


def notify(hooks: Hooks, report: DrillReport, page: str) -> list[str]:
    """Run all hooks and return what failed; a failed one does not affect the others. ``page`` is the URL of the report."""
    summary = asdict(summarize(report, page))
    actions: list[tuple[str, bool, Callable[[], None]]] = [
        ("the textfile", bool(hooks.textfile), lambda: _write_textfile(hooks.textfile, report)),
        ("the webhook", bool(hooks.webhook), lambda: _send(hooks.webhook, summary)),
        (
            "the heartbeat",
            bool(hooks.heartbeat) and report.verdict is DrillVerdict.PASSED,
            lambda: _send(hooks.heartbeat),
        ),
        ("the command", bool(hooks.command), lambda: _run(hooks.command, summary)),
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
class Summary:
    """The figures of a drill, for hooks and for ``drill run``. Times in seconds, sizes in bytes; None = not measured."""

    id: str
    verdict: str
    exit_code: int
    scenario: str
    started_ms: int
    seconds: float
    rpo: float | None
    rto: float | None
    cut_over: float | None
    keys: int | None
    """Counted after the restore."""
    restore_ts: int | None
    """The time that was restored; None = the drill's scenario has none, or it failed before."""
    data_bytes: int
    backup: str
    """URL of the backup; ``""`` = the drill failed before it had one."""
    missed: tuple[str, ...]
    """Names of the objectives that were missed."""
    message: str
    """Message of the failure; ``""`` = none."""
    page: str
    """URL of the report's page; the JSON is beside it. ``""`` = it could not be written."""


def summarize(report: DrillReport, page: str) -> Summary:
    """The figures of a report; ``page`` is the URL of its page."""
    backup, trouble, keys = report.backup, report.trouble, report.value("keys")
    return Summary(
        id=report.id,
        verdict=report.verdict.value,
        exit_code=_exit_code(report),
        scenario=report.scenario,
        started_ms=report.started_ms,
        seconds=report.seconds,
        rpo=report.value("RPO"),
        rto=report.value("RTO"),
        cut_over=report.value("cut-over"),
        keys=None if keys is None else int(keys),
        restore_ts=report.point.restore_ts if report.point else None,
        data_bytes=backup.data_bytes if backup else 0,
        backup=backup.place if backup else "",
        missed=tuple(goal.name for goal in report.goals if not goal.met),
        message=trouble.message if trouble else "",
        page=page,
    )


def _exit_code(report: DrillReport) -> int:
    if report.trouble is not None:
        return report.trouble.exit_code
    return ObjectivesMissed.exit_code if report.verdict is DrillVerdict.MISSED else 0


def _write_textfile(path: str, report: DrillReport) -> None:
    from prometheus_client import CollectorRegistry, Gauge

    from tikv_br.web.metrics import write_textfile

    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"{METRIC}_{name}", text, ("scenario",), registry=registry).labels(report.scenario).set(value)

    gauge("success", "Whether the last drill passed.", float(report.verdict is DrillVerdict.PASSED))
    gauge("end_timestamp_seconds", "When the last drill ended.", report.started_ms / 1000 + report.seconds)
    gauge("duration_seconds", "How long the last drill took.", report.seconds)
    gauge("rpo_seconds", "Recovery point: how much of the last writes would have been lost.", report.value("RPO"))
    gauge("rto_seconds", "Recovery time: how long restore and verification took.", report.value("RTO"))
    gauge("cut_over_seconds", "How long clients could not have written during the cut-over.", report.value("cut-over"))
    gauge("keys", "Keys counted after the restore.", report.value("keys"))
    passed = [each for each in report.trend if each.verdict == DrillVerdict.PASSED and each.scenario == report.scenario]
    last_success = max((each.started_ms / 1000 + each.seconds for each in passed), default=None)
    gauge("last_success_timestamp_seconds", "When the last drill of the scenario that passed ended.", last_success)
    write_textfile(Path(path), registry)


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


def _run(command: tuple[str, ...], body: Mapping[str, object]) -> None:
    figures = {f"TIKV_BR_DRILL_{name.upper()}": _text(value) for name, value in body.items()}
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **figures},
        timeout=COMMAND_SECONDS,
        check=True,
    )


def _text(value: object) -> str:
    """Format a figure as an environment variable; empty if not measured."""
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value is None else str(value)


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
