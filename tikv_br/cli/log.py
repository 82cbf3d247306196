"""Logging for the command line: calm lines on stderr or in a file, each with the run's id, never a secret in them."""

from __future__ import annotations

import enum
import json
import logging
import re
import sys
import time
from dataclasses import dataclass

from tikv_br import run_id
from tikv_br.cli.options import LogLevel
from tikv_br.errors import UsageError

_SECRETS = re.compile(
    r"(?i)((?:secret[-_]?access[-_]?key|access[-_]?key(?:[-_]?id)?|session[-_]?token|password|authorization"
    r"|(?<![\w.-])(?:--)?crypter\.key(?![\w.-]))['\"]?(?:\s*[=:]\s*['\"]?|\s+))([^\s&'\",}]+)"
)
_USER_INFO = re.compile(r"(://)[^/@\s]+@|(?<![\w/])[^\s/@:'\"]+:[^\s/@'\"]+@(?=[\w\[])")
_OURS = ("tikv_br", "incremental")


class LogForm(enum.StrEnum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, where to (None: stderr) and how."""

    level: LogLevel = LogLevel.INFO
    file: str | None = None
    form: LogForm = LogForm.TEXT


class _Current:
    settings = LogSettings()


def secrets_in(text: str) -> list[str]:
    """What `redact` blanks of names and values."""
    return [match[2] for match in _SECRETS.finditer(text)]


def redact(text: str) -> str:
    """Blank what looks like a credential: URL parameters, key=value pairs and user:password@ of a URL."""
    return _USER_INFO.sub(r"\1***@", _SECRETS.sub(r"\1***", text))


class _TextFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s [%(run_id)s] %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.run_id = run_id.current() or "-"
        return redact(super().format(record))


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


def configure(level: LogLevel | None = None, *, file: str | None = None, form: LogForm | None = None) -> None:
    """Change what is given of how our own records are logged; others' are from warning on. Raises `UsageError`."""
    old = _Current.settings
    settings = LogSettings(level or old.level, file or old.file, form or old.form)
    handler = _handler(settings.file)
    if settings.level is not LogLevel.DEBUG:
        handler.addFilter(_is_worth_telling)
    handler.setFormatter(_JsonFormatter() if settings.form is LogForm.JSON else _TextFormatter())
    close()
    _Current.settings = settings
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(settings.level.value.upper())
    logging.captureWarnings(capture=True)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """All but what py4j complains of, through the root logger, when a JVM ends: what matters of it is an error of ours."""
    return "/py4j/" not in record.pathname


def reset() -> None:
    """Forget what an earlier run in this process has configured."""
    _Current.settings = LogSettings()
    close()


def close() -> None:
    """Close the log file, if one is open."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()


def has_file() -> bool:
    """Whether the log goes to a file, and stderr stays free."""
    return _Current.settings.file is not None


def is_debug() -> bool:
    """Whether --log-level debug was asked for."""
    return logging.getLogger("tikv_br").getEffectiveLevel() <= logging.DEBUG


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler(sys.stderr)
    from logging.handlers import WatchedFileHandler  # follows logrotate; its imports are not small

    try:
        return WatchedFileHandler(file, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-file {file}: {error.strerror or error}") from None
