"""The log: lines on stderr or in a file, each with the run's id and without secrets."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TextIO

from msgspec import Struct

from tikv_br import retry, run_id
from tikv_br.errors import UsageError
from tikv_br.redaction import redact, visible, visible_lines
from tikv_br.storage.url import expand_home


class LogLevel(enum.StrEnum):
    """The least severity that is logged, as in the standard library."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogForm(enum.StrEnum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


class LogSettings(Struct, frozen=True):
    """Level, file (None: stderr) and format of the log."""

    level: LogLevel = LogLevel.INFO
    file: str | None = None
    form: LogForm = LogForm.TEXT
    quiet: bool = False
    """Log only warnings and errors outside the file."""


class _Current:
    settings = LogSettings()


class _TextFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s [%(run_id)s] %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.run_id = run_id.current() or "-"
        return redact(visible_lines(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the standard library
        record.message = visible(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "run_id": run_id.current() or "-",
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(fields, separators=(",", ":"))


def configure(
    level: LogLevel | None = None, *, file: str | None = None, form: LogForm | None = None, quiet: bool | None = None
) -> None:
    """Change the given settings. Records of other libraries are logged from warnings on. Raises `UsageError`."""
    old = _Current.settings
    settings = LogSettings(
        level or old.level, file or old.file, form or old.form, old.quiet if quiet is None else quiet
    )
    handler = _handler(settings.file)
    if settings.quiet and settings.file is None:
        handler.setLevel(logging.WARNING)
    if settings.level is not LogLevel.DEBUG:
        # When a JVM ends, py4j logs what our own errors report.
        handler.addFilter(lambda record: "/py4j/" not in record.pathname)
    handler.setFormatter(_JsonFormatter() if settings.form is LogForm.JSON else _TextFormatter())
    close()
    _Current.settings = settings
    root = logging.getLogger()
    root.handlers[:] = [handler] if settings.file is None else [handler, _outages_on_stderr()]
    root.setLevel(logging.WARNING)
    logging.getLogger("tikv_br").setLevel(settings.level.value.upper())
    logging.captureWarnings(capture=True)
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The first line: others are tracebacks of libraries, as numba's about a variable that it cannot parse."""
    del filename, lineno, line  # of no use to people
    return f"{category.__name__}: {str(message).partition(chr(10))[0]}"


def _outages_on_stderr() -> logging.Handler:
    """Beside a log file: what a command waits for must be seen where it was started."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(_TextFormatter())
    console.addFilter(lambda record: record.name == retry.__name__)
    return console


def reset() -> None:
    """Reset the settings of an earlier run in this process."""
    _Current.settings = LogSettings()
    close()


def close() -> None:
    """Close the log file, if one is open."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()


@contextlib.contextmanager
def through(stream: TextIO) -> Iterator[None]:
    """Within the context, log to another stream than stderr, such as one that a live display shares."""
    ours = [each for each in logging.getLogger().handlers if type(each) is logging.StreamHandler]
    before = [(each, each.setStream(stream)) for each in ours]
    try:
        yield
    finally:
        for each, old in before:
            if old is not None:
                each.setStream(old)


def has_file() -> bool:
    """Whether the log goes to a file."""
    return _Current.settings.file is not None


def is_quiet() -> bool:
    """Whether --quiet was passed."""
    return _Current.settings.quiet


def is_debug() -> bool:
    """Whether --log-level debug was asked for."""
    return logging.getLogger("tikv_br").getEffectiveLevel() <= logging.DEBUG


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler(sys.stderr)
    from logging.handlers import WatchedFileHandler  # follows logrotate; its imports are not small

    try:
        return WatchedFileHandler(expand_home(file), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-file {file}: {error.strerror or error}") from None
