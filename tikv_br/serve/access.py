"""Checks of addresses and of the token. Imports nothing heavy."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from tikv_br.errors import UsageError
from tikv_br.redaction import redact
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address

MIN_TOKEN = 16
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::[0-9]+)?", re.ASCII | re.IGNORECASE)


def check_access(address: Address, token: SecretText) -> None:
    """Refuse a weak token, and an address that other machines reach without one. Raises `UsageError`."""
    text = token.reveal()
    if token and (len(text) < MIN_TOKEN or not all("!" <= each <= "~" for each in text)):
        raise UsageError(
            f"the token must have at least {MIN_TOKEN} printable ASCII characters, without spaces",
            hint="Create one, for example: openssl rand -hex 32 >FILE",
        )
    if not token and not address.is_loopback:
        raise UsageError(
            f"--listen {address}: other machines can connect to this address, and no token is set",
            hint="Pass --token-file FILE or set TIKV_BR_SERVE_TOKEN, or listen on 127.0.0.1.",
        )


def is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine. A site that rebinds its name to loopback sends its own name."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def parse_status_url(url: str) -> str:
    """Return the URL of a status page without trailing slash. Raises `UsageError`."""
    example = "Pass HOST:PORT or http://HOST:PORT."
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or re.search(r"[\x00-\x20\x7f-\uffff]", url):
        raise UsageError(f"--status {redact(url)!r} is not an address", hint=example)
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "--status: the address must not contain a user, a query or a key",
            hint=f"{example} Pass the key with --status-key-file.",
        )
    return parts.geturl().rstrip("/")
