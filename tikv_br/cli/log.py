"""Logging for the command line: calm lines on stderr, never a secret in them."""

from __future__ import annotations

import logging
import re
import sys
import time

from tikv_br.cli.options import LogLevel

_SECRETS = re.compile(
    r"(?i)((?:secret[-_]?access[-_]?key|access[-_]?key(?:[-_]?id)?|session[-_]?token|password|authorization|crypter\.key)"
    r"['\"]?\s*[=:]\s*['\"]?)([^\s&'\",}]+)"
)
_USER_INFO = re.compile(r"(://)[^/@\s]+@")


def redact(text: str) -> str:
    """Blank what looks like a credential: URL parameters, key=value pairs and user:password@ of a URL."""
    return _USER_INFO.sub(r"\1***@", _SECRETS.sub(r"\1***", text))


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def configure(level: LogLevel) -> None:
    """Send log records of ours from ``level`` on, and of others from warning on, to stderr. Safe to call again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("tikv_br", "incremental"):
        logging.getLogger(name).setLevel(level.value.upper())
    logging.captureWarnings(capture=True)


def is_debug() -> bool:
    """Whether --log-level debug was asked for."""
    return logging.getLogger("tikv_br").getEffectiveLevel() <= logging.DEBUG
