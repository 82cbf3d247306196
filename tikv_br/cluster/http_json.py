"""JSON over HTTP with PD and the stores' status ports."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import ClusterError, ClusterTlsError, ClusterUnreachable, RequestRefused

TEXT_SHOWN = 200
"""Characters of an error page that a message quotes."""


def get_json(url: str, tls: TlsFiles, timeout: float) -> object:
    """GET a JSON document; `timeout` is in seconds. Raises as `request_json` does."""
    return request_json("GET", url, tls, timeout)


def request_json(
    method: str,
    url: str,
    tls: TlsFiles,
    timeout: float,
    payload: object = None,
    *,
    object_hook: Callable[[dict[str, Any]], object] | None = None,
) -> object:
    """Send `payload` as JSON, if any, and return the answer's JSON; None for an empty answer.

    `object_hook` may replace each object as soon as it is parsed, innermost first: so large answers stay small here.
    Raises `ClusterUnreachable` (also for 5xx), `ClusterTlsError`, or `RequestRefused` for any other failure.
    """
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})  # noqa: S310 - the scheme is ours
    try:
        with _opener(tls).open(request, timeout=timeout) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _http_error(url, error.code, error.read(TEXT_SHOWN).decode(errors="replace")) from None
    except urllib.error.URLError as error:
        raise _connection_error(url, error.reason) from None
    except (OSError, HTTPException) as error:
        raise _connection_error(url, error) from None
    try:
        return json.loads(body, object_hook=object_hook) if body.strip() else None
    except ValueError:
        raise RequestRefused(f"{url}: the answer is no JSON: {body[:TEXT_SHOWN]!r}") from None


def _opener(tls: TlsFiles) -> urllib.request.OpenerDirector:
    """Without the environment's proxies: servers of a cluster are not on the web."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls.enabled:
        handlers.append(urllib.request.HTTPSHandler(context=tls.ssl_context()))
    return urllib.request.build_opener(*handlers)


def _http_error(url: str, code: int, text: str) -> ClusterError:
    error_class = ClusterUnreachable if code >= HTTPStatus.INTERNAL_SERVER_ERROR else RequestRefused
    return error_class(f"{url}: HTTP {code}: {text.strip()}")


def _connection_error(url: str, reason: object) -> ClusterError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return ClusterTlsError(f"{url}: the certificate is not trusted: {reason.verify_message}")
    if isinstance(reason, ssl.SSLError):
        return ClusterTlsError(f"{url}: the TLS handshake failed: {reason.reason or reason}")
    return ClusterUnreachable(f"{url}: {reason}")
