"""Logs: one calm line each, on stderr, without secrets."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from tikv_br.cli.log import configure, is_debug, redact
from tikv_br.cli.options import LogLevel


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(capture=False)
    for name in ("tikv_br", "incremental"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "text",
    [
        "s3://b/p?access-key=SECRET&secret-access-key=SECRET&session-token=SECRET&region=eu",
        "s3://b/p?Secret_Access_Key=SECRET",
        "http://user:SECRET@host/path",
        '{"secret_access_key": "SECRET", "region": "eu"}',
        "Authorization: SECRET",
        "password = 'SECRET'",
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
    logging.getLogger("tikv_br.backup").info("to s3://b/p?secret-access-key=%s", "SECRET")
    logging.getLogger("tikv_br.backup").debug("unseen")
    logging.getLogger("botocore").info("unseen")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO to s3://b/p\?secret-access-key=\*\*\*\n", err)


def test_debug_is_known() -> None:
    """Whether tracebacks are wanted follows the last configuration."""
    configure(LogLevel.DEBUG)
    assert is_debug()
    configure(LogLevel.WARNING)
    assert not is_debug()
