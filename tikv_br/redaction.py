"""Blanks what looks like a credential in texts for people and machines: the last net below code that shows none."""

from __future__ import annotations

import re

_SECRETS = re.compile(
    r"(?i)((?:secret[-_]?access[-_]?key|access[-_]?key(?:[-_]?id)?|session[-_]?token|password|authorization"
    r"|(?<![\w.-])(?:--)?crypter\.key(?![\w.-]))['\"]?(?:\s*[=:]\s*['\"]?|\s+))((?:(?:bearer|basic)\s+)?[^\s&'\",}]+)"
)
_SECRET_URLS = re.compile(
    r"(?i)((?:heartbeat|webhook)[-_]url['\"]?(?:\s*[=:]\s*['\"]?|\s+))(https?://(?:[^\s'\",}]|,(?=[^\s'\"]))+)"
)
"""Of services whose URL is all that one needs to speak in our name."""
_USER_INFO = re.compile(r"(://)[^/@\s]+@|(?<![\w/])[^\s/@:'\"]+:[^\s/@'\"]+@(?=[\w\[])")


def secrets_in(text: str) -> list[str]:
    """What `redact` blanks of names and values."""
    return [match[2] for pattern in (_SECRETS, _SECRET_URLS) for match in pattern.finditer(text)]


def redact(text: str) -> str:
    """Blank what looks like a credential: URL parameters, key=value pairs and user:password@ of a URL."""
    return _USER_INFO.sub(r"\1***@", _SECRET_URLS.sub(r"\1***", _SECRETS.sub(r"\1***", text)))
