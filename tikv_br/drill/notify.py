"""Tells others how a drill ended: heartbeat, webhook, textfile for Prometheus, command. What fails in it is a warning."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tikv_br.drill.hooks import Hooks
from tikv_br.drill.report import DrillReport
from tikv_br.errors import ObjectivesMissed
from tikv_br.report.facts import Verdict
from tikv_br.storage.secret import SecretText

PATIENCE = 20.0
"""Seconds that a server may be silent; twice as many for all of a request."""
NO_ANSWER = "no answer in time"
COMMAND_SECONDS = 300.0
METRIC = "tikv_br_drill"
log = logging.getLogger(__name__)


def tell(hooks: Hooks, report: DrillReport, page: str) -> list[str]:
    """Tell everybody, and return what did not work; one that fails keeps nothing from the others. ``page`` is its URL."""
    summary = asdict(summarize(report, page))
    asked: list[tuple[str, bool, Callable[[], None]]] = [
        ("the textfile", bool(hooks.textfile), lambda: _write_textfile(hooks.textfile, report)),
        ("the webhook", bool(hooks.webhook), lambda: _post(hooks.webhook, summary)),
        ("the heartbeat", bool(hooks.heartbeat) and report.verdict is Verdict.PASSED, lambda: _get(hooks.heartbeat)),
        ("the command", bool(hooks.command), lambda: _run(hooks.command, summary)),
    ]
    problems = []
    for name, wanted, act in asked:
        try:
            if wanted:
                act()
        except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
            problems.append(f"{name} did not work: {_reason(error)}")
            log.warning(problems[-1])
    return problems


@dataclass(frozen=True, slots=True)
class Summary:
    """A drill in a line, for whoever is told. Times in seconds, sizes in bytes; None = not measured."""

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
    """Proven after the restore."""
    data_bytes: int
    backup: str
    """URL of the backup that was rehearsed; ``""`` = it did not come to that."""
    missed: tuple[str, ...]
    """Objectives."""
    message: str
    """What went wrong; ``""`` = nothing."""
    page: str
    """URL of the report's page; the JSON lies beside it. ``""`` = it could not be written."""


def summarize(report: DrillReport, page: str) -> Summary:
    """The line of a report whose page lies at a URL."""
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
        data_bytes=backup.data_bytes if backup else 0,
        backup=backup.place if backup else "",
        missed=tuple(goal.name for goal in report.goals if not goal.met),
        message=trouble.message if trouble else "",
        page=page,
    )


def _exit_code(report: DrillReport) -> int:
    """That of the command."""
    if report.trouble is not None:
        return report.trouble.exit_code
    return ObjectivesMissed.exit_code if report.verdict is Verdict.MISSED else 0


def _write_textfile(path: str, report: DrillReport) -> None:
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"{METRIC}_{name}", text, ("scenario",), registry=registry).labels(report.scenario).set(value)

    gauge("success", "Whether the last drill has passed.", float(report.verdict is Verdict.PASSED))
    gauge("end_timestamp_seconds", "When it ended.", report.started_ms / 1000 + report.seconds)
    gauge("duration_seconds", "How long it took.", report.seconds)
    gauge("rpo_seconds", "How much of the last writes would have been lost.", report.value("RPO"))
    gauge("rto_seconds", "How long the recovery took.", report.value("RTO"))
    gauge("cut_over_seconds", "How long nobody could have written when clients move over.", report.value("cut-over"))
    gauge("keys", "Keys that were proven after it.", report.value("keys"))
    gauge(
        "last_success_timestamp_seconds",
        "When the last drill of the scenario that passed ended.",
        _last_success(report),
    )
    if Path(path).exists() and not Path(path).is_file():
        raise FileExistsError(errno.EEXIST, "it is no file", path)
    write_to_textfile(path, registry)


def _last_success(report: DrillReport) -> float | None:
    """By this drill and those before it; None where no report of one is left."""
    passed = [each for each in report.trend if each.verdict == Verdict.PASSED and each.scenario == report.scenario]
    return max((each.started_ms / 1000 + each.seconds for each in passed), default=None)


def _post(url: SecretText, body: Mapping[str, object]) -> None:
    data = json.dumps(body).encode()
    _ask(
        urllib.request.Request(  # noqa: S310 - the scheme was checked
            url.reveal(), data, {"Content-Type": "application/json"}, method="POST"
        )
    )


def _get(url: SecretText) -> None:
    _ask(urllib.request.Request(url.reveal()))  # noqa: S310 - the scheme was checked


def _ask(request: urllib.request.Request) -> None:
    """Send it, and want an answer in time; a server that sends a byte now and then does not hold us longer."""
    failed: list[Exception] = []

    def send() -> None:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE):  # noqa: S310
                pass
        except (OSError, ValueError, http.client.HTTPException) as error:
            failed.append(error)

    thread = threading.Thread(target=send, name="hook", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    if thread.is_alive():
        raise TimeoutError(NO_ANSWER)
    if failed:
        raise failed[0]


def _run(command: tuple[str, ...], body: Mapping[str, object]) -> None:
    said = {f"TIKV_BR_DRILL_{name.upper()}": _text(value) for name, value in body.items()}
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **said},
        timeout=COMMAND_SECONDS,
        check=True,
    )


def _text(value: object) -> str:
    """As it stands in the environment: nothing for what was not measured."""
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value is None else str(value)


def _reason(error: Exception) -> str:
    """Why, without the URL or the arguments, which may hold secrets."""
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
            return f"it did not end within {error.timeout:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return type(error).__name__
