"""Replaces credentials in output and logs by ``***``: a safety net behind code that should not print any."""

from __future__ import annotations

import re

_SECRETS = re.compile(
    r"(?i)((?:secret[-_]?access[-_]?key|access[-_]?key(?:[-_]?id)?|session[-_]?token|password|authorization"
    r"|account[-_]?key|azure_storage_(?:key|sas_key|sas_token)(?==)|(?<!azure_storage_)sas[-_]?(?:token|key)|(?<![\w-])sig(?==)"
    r"|spark\.[\w.-]*(?:secret|passw|token|credential|access[.-]?key)[\w.-]*"
    r"|(?<![\w.-])--token(?![\w.-])|(?<![\w.-])token(?=['\"]?\s*[=:])"
    r"|(?<![\w.-])(?:--)?crypter\.key(?![\w.-]))['\"]?(?:\s*[=:]\s*['\"]?|\s+))((?:(?:bearer|basic)\s+)?[^\s&'\",}]+)"
)
_SECRET_URLS = re.compile(
    r"(?i)((?:heartbeat|webhook)[-_]url['\"]?(?:\s*[=:]\s*['\"]?|\s+))(https?://(?:[^\s'\",}]|,(?=[^\s'\"]))+)"
)
"""URLs that are secrets themselves: knowing one is enough to post to the service."""
_USER_INFO = re.compile(r"(://)[^/@\s]+@|(?<![\w/])[^\s/@:'\"]+:[^\s/@'\"]+@(?=[\w\[])")


def secrets_in(text: str) -> list[str]:
    """The values that `redact` replaces in key=value pairs; not the user info of URLs."""
    return [match[2] for pattern in (_SECRETS, _SECRET_URLS) for match in pattern.finditer(text)]


def redact(text: str) -> str:
    """Replace credentials in URL parameters, key=value pairs and the user info of URLs."""
    return _USER_INFO.sub(r"\1***@", _SECRET_URLS.sub(r"\1***", _SECRETS.sub(r"\1***", text)))
