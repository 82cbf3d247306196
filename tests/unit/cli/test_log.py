"""Logs: one calm line each, on stderr, without secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.support.clock import Clock
from tests.support.tools import Terminal
from tikv_br.cli.command import leaves
from tikv_br.cli.log import LogForm, LogLevel, configure, is_debug, reset
from tikv_br.cli.main import app, run
from tikv_br.cli.output import Output, OutputForm
from tikv_br.cli.progress import BarProgress, progress_display
from tikv_br.cli.settings import options
from tikv_br.progress_events import StepFinished, StepStarted, TasksProgress
from tikv_br.redaction import redact
from tikv_br.retry import Outage


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    reset()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(capture=False)
    logging.getLogger("tikv_br").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bkt/p?access-key=SECRET&secret-access-key=SECRET&session-token=SECRET&region=eu",
        "s3://bkt/p?Secret_Access_Key=SECRET",
        "http://user:SECRET@host/path",
        '{"secret_access_key": "SECRET", "region": "eu"}',
        "Authorization: SECRET",
        "Authorization: Bearer SECRET",
        "password = 'SECRET'",
        "--crypter.key SECRET --pd x",
        "--token SECRET --listen 0.0.0.0:8390",
        "token=SECRET",
        '{"token": "SECRET"}',
        "--webhook-url https://SECRET --heartbeat-url=http://SECRET",
        "--webhook-url https://a.example.com/x,SECRET drill",
        "crypter.key=SECRET",
        '{"crypter.key": "SECRET"}',
    ],
)
def test_secrets_are_blanked_and_the_rest_is_kept(text: str) -> None:
    """No form in which a credential is usually written shows it; what surrounds it stays readable."""
    shown = redact(text)
    assert "SECRET" not in shown
    assert "***" in shown
    if "region" in text:
        assert "eu" in shown


def test_lines_are_utc_with_level_and_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """A line has time, level and message, redacted, and stdout stays free."""
    configure(LogLevel.INFO)
    logging.getLogger("tikv_br.backup").info("to s3://bkt/p?secret-access-key=%s", "SECRET")
    logging.getLogger("tikv_br.backup").debug("unseen")
    logging.getLogger("botocore").info("unseen")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO \[-\] to s3://bkt/p\?secret-access-key=\*\*\*\n", err)


def test_debug_is_known() -> None:
    """Whether tracebacks are wanted follows the last configuration."""
    configure(LogLevel.DEBUG)
    assert is_debug()
    configure(LogLevel.WARNING)
    assert not is_debug()


def test_json_lines_have_time_level_logger_and_the_runs_id(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is one object, a traceback inside it, and neither shows a secret."""
    configure(LogLevel.DEBUG, form=LogForm.JSON)
    error = ValueError("password=SECRET")
    logging.getLogger("tikv_br.backup").error("to %s", "s3://bkt/p?secret-access-key=SECRET", exc_info=error)
    text = capsys.readouterr().err
    assert "SECRET" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == (
        "error",
        "tikv_br.backup",
        "to s3://bkt/p?secret-access-key=***",
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert "ValueError: password=***" in line["exception"]


def test_file_takes_lines_progress_and_failure_and_is_appended_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --log-file stderr stays free of log lines, and what ended two commands is in the file under their ids."""
    file = tmp_path / "log"
    for _ in range(2):
        assert run(["show", "--storage", f"{tmp_path}/none", "--log-file", str(file), "--log-format", "json"]) == 31
        assert capsys.readouterr().err.startswith("Error: ")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["level"] for line in lines] == ["error", "error"]
    assert all("BackupNotFound" in line["message"] and "exit code 31" in line["message"] for line in lines)
    assert len({line["run_id"] for line in lines}) == 2


def test_steps_are_in_the_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the display on the terminal is, the file has a line for each step, and one each 10 %."""
    file = tmp_path / "log"
    configure(file=str(file))
    with progress_display(Output(OutputForm.JSON)) as display:
        display(StepStarted("copy", 1, 2))
        for percent in range(101):
            display(TasksProgress(percent, 100, 1, 1, percent / 100, 1.0))
        display(StepFinished("copy", 1, 2, 0.5))
    lines = [line.split("] ", 1)[1] for line in file.read_text().splitlines()]
    assert (lines[0], lines[-1]) == ("step 1/2: copy", "step 1/2: copy: done in 0.50s")
    assert [line[:4] for line in lines[1:-1]] == [f"{percent:3}%" for percent in range(0, 101, 10)]
    assert len(capsys.readouterr().out.splitlines()) >= 95


@pytest.mark.parametrize(
    ("flags", "shown"),
    [({}, True), ({"file": "log"}, False), ({"quiet": True}, False), ({"quiet": True, "file": "log"}, False)],
)
def test_without_a_terminal_progress_is_told_in_one_place(
    flags: dict[str, Any],
    shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Progress goes to stderr by default, else only to the log file, or nowhere; warnings are always shown."""
    monkeypatch.chdir(tmp_path)
    configure(**flags)
    with progress_display(Output()) as display:
        display(StepStarted("copy", 1, 2))
        display(TasksProgress(1, 2, 1, 1, 0.5, 1.0))
        display(StepFinished("copy", 1, 2, 2.0))
    logging.getLogger("tikv_br.x").info("a detail")
    logging.getLogger("tikv_br.x").warning("trouble")
    Output().result("summary", {}, "all is well")
    Output().result("schedule", {}, "the requested result")
    captured = capsys.readouterr()
    reported = captured.err + ((tmp_path / "log").read_text() if "file" in flags else "")
    assert ("step 1/2: copy" in captured.err) == shown
    assert ("step 1/2: copy" in reported) == (shown or "file" in flags)
    assert ("a detail" in reported) == ("file" in flags or not flags)
    assert "trouble" in reported
    assert captured.out == ("" if flags.get("quiet") else "all is well\n") + "the requested result\n"


def test_log_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is said before anything is done."""
    assert run(["version", "--log-file", f"{tmp_path}/none/log"]) == 2
    assert "--log-file" in capsys.readouterr().err


def test_py4j_complains_in_debug_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages that py4j logs through the root logger after its JVM has ended are hidden."""
    record = logging.makeLogRecord({"msg": "lost", "levelno": logging.ERROR, "pathname": "/x/py4j/java_gateway.py"})
    for level, reported in ((LogLevel.INFO, False), (LogLevel.DEBUG, True)):
        configure(level)
        logging.getLogger().handle(record)
        assert ("lost" in capsys.readouterr().err) is reported


HUSH = "5ec2e7" * 6
"""A wrong key, and a word that occurs nowhere else."""
SECRETS = {
    "storage": f"s3://bkt/p?access-key=AK{HUSH}&secret-access-key={HUSH}&session-token={HUSH}&nonsense=1",
    "state": f"s3://user:{HUSH}@b/p?nonsense=1",
    "crypter.key": HUSH,
    "pd": f"http://user:{HUSH}@127.0.0.1:nonsense",
}
"""A wrong value for each flag that may carry a secret, so that a message has reason to quote it."""


@pytest.mark.parametrize("form", [pytest.param("console", marks=pytest.mark.slow), "json"])
def test_no_command_tells_a_secret(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong credentials and keys are in no output, no traceback, no log, whichever flag of whichever command had them."""
    file, met = tmp_path / "log", set()
    for path, command in leaves(typer.main.get_command(app)):
        flags = options(command).keys()
        for flag in flags & SECRETS.keys():
            words = [*path, f"--{flag}", SECRETS[flag], "--output", form]
            words += ["--log-level", "debug", "--log-file", str(file)]
            if "storage" in flags - {flag}:
                words += ["--storage", str(tmp_path / "none")]
            assert run(words) != 0, words
            reported = capsys.readouterr()
            assert HUSH not in reported.out + reported.err, (path, flag)
            met.add(flag)
    assert HUSH not in file.read_text()
    assert met == SECRETS.keys()


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (("--crypter.key", "603deb10"), True),
        (("--crypter.key=603deb10",), True),
        (("--crypter.key-file", "/nowhere"), False),
    ],
)
def test_a_credential_on_the_command_line_is_a_warning(
    flags: tuple[str, ...], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --quiet; the message does not contain it."""
    run(["list", "--quiet", "--storage", "/nowhere", *flags])
    shown = capsys.readouterr().err
    assert ("a credential was passed on the command line" in shown) is warns
    assert "603deb10" not in shown


def test_an_outage_is_on_the_console_beside_a_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outage is also shown on the console; other lines are in the file only."""
    file = tmp_path / "log"
    configure(file=str(file))
    logging.getLogger("tikv_br.cluster").warning("something else")
    clock = Clock()
    silent_for(Outage("PD 1.2.3.4:2379", 60.0, clock=clock), clock)
    [line] = capsys.readouterr().err.splitlines()
    assert "WARNING" in line
    assert "PD 1.2.3.4:2379 has not answered for 10 s, trying until" in line
    assert [line] == file.read_text().splitlines()[1:]


def test_an_outage_does_not_break_the_bar() -> None:
    """On a terminal its line is above the bar, which is redrawn."""
    configure()
    terminal, clock = Terminal(), Clock()
    with BarProgress(terminal) as display:
        display(StepStarted("scan", 1, 1))
        silent_for(Outage("PD", 60.0, clock=clock), clock)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
    assert [
        line for line in plain.splitlines() if re.search(r"WARNING .* PD has not answered for 10 s, trying until", line)
    ]


def silent_for(outage: Outage, clock: Clock) -> None:
    """Let a server miss two requests, ten seconds apart."""
    outage.fail()
    clock.now += 10
    outage.fail()
