"""A failed request to a cloud, as obstore reports it, and the error that it becomes."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass
from xml.sax.saxutils import unescape

from obstore.exceptions import UnauthenticatedError

from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage.url import StorageLocation

OVERLOADED = {408, 429, 500, 502, 503, 504}
_IDLE_CONNECTION = "RequestTimeout"
"""S3's code, with status 400, for a request whose body did not arrive in time."""
MOVED = 301
REFUSED_RANGE = 416
_NOT_DONE = {429, 500, 503}
_UNSENT = "Connect"
"""obstore's kind of a failure before anything was sent."""

_CREDENTIAL_FAILURES = "TokenRequest|TokenResponseBody|Credential|AzureCli|AzureCliResponse|FederatedTokenFile"
"""obstore's kinds of failures to get a token."""
UNKNOWN_HINT = "The message is from the storage's endpoint; check its log."
_NO_STORAGE_HINT = (
    "Pass the endpoint of the storage itself, with its scheme and port; a web page or a proxy may answer there."
)
_CONNECTION_CAUSES = (
    ("TunnelUnsuccessful", "the proxy refuses to connect to it"),
    ("ProxyAuthRequired", "the proxy requires credentials"),
    ("Connection refused", "connection refused"),
    ("dns error", "the host name does not resolve"),
    ("InvalidContentType", "the endpoint does not use TLS; does it need http://?"),
    ("Expired", "its certificate has expired"),
    ("NotValidForName", "its certificate is for another name"),
    ("InvalidCertificate", "its certificate is not trusted"),
    ("UnknownIssuer", "its certificate is not trusted"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "no route to the host"),
    ("imed out", "no answer in time"),
    ("Timeout", "no answer in time"),
    ("Elapsed", "no answer in time"),
)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The parts of a failed request that decide and that may be shown."""

    status: int
    """HTTP status; 0 = no answer came."""
    code: str
    message: str
    region: str
    """The region that the server says is right."""
    text: str
    """All of it, not for showing."""
    broken: str = ""
    """obstore's kind of a failed connection: ``Connect``, ``Timeout``, ``Interrupted`` …; ``""`` = it did not fail."""
    cause: str = ""
    """Cause of a failed connection; contains no name of a bucket or object."""
    is_page: bool = False
    """True if the body is HTML: no object storage, but a proxy or a web server has answered."""
    lacks_credentials: bool = False
    """True if the service that issues credentials failed; nothing was sent to the storage."""

    @property
    def answered(self) -> bool:
        return self.status != 0

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed a moment later."""
        return bool(self.broken) if not self.answered else self.status in OVERLOADED or self.code == _IDLE_CONNECTION

    @property
    def had_no_effect(self) -> bool:
        """Return whether the request certainly had no effect: it was not sent, or the server reported its failure."""
        return self.broken == _UNSENT or self.status in _NOT_DONE or self.code == _IDLE_CONNECTION


def failure_of(error: Exception) -> RequestFailure:
    """Read what obstore says of a failed request.

    Only in the report of the cause that obstore appends, and by marks that begin on lines of their own: names of buckets and
    objects, which stand elsewhere in the text, cannot contain a line break.
    """
    text = str(error)
    if re.search(r"\n\s*inner: BareRedirect", text):  # to the bucket's true region
        return RequestFailure(MOVED, "PermanentRedirect", "", "", text)
    if re.search(rf"\n\s*source: ({_CREDENTIAL_FAILURES})( \{{|,)\n", text):
        return RequestFailure(0, "", "", "", text, lacks_credentials=True)
    if re.search(r"\n\s*kind: Redirect,\n", text):  # to addresses that redirect again
        return RequestFailure(HTTPStatus.FOUND, "", "", "", text)
    if broken := re.search(r"HttpError \{\n\s*kind: (\w+),\n.*", text, re.DOTALL):
        return RequestFailure(0, "", "", "", text, broken[1], broken[0])
    if re.search(r"\n\s*source: StartTooLarge \{\n", text):
        return RequestFailure(REFUSED_RANGE, "", "", "", text)
    # Of a batch of deletions, as obstore sends them to Azure.
    if deletion := re.search(r'\n\s*code: "(\d{3})",\n\s*reason: "((?:[^"\\]|\\.)*)",?\n', text):
        return RequestFailure(int(deletion[1]), "", deletion[2], "", text)
    status = re.search(r"\n\s*inner: Status \{\n\s*status: (\d{3}),", text)
    found = re.search(r'\n\s*body: Some\(\n\s*"((?:[^"\\]|\\.)*)",?\n', text)
    body = found[1].replace('\\"', '"') if found else ""
    return RequestFailure(
        int(status[1]) if status else 0,
        _element(body, "Code"),
        _element(body, "Message")
        .partition("\\nRequestId:")[0]
        .strip(),  # Azure adds the id of the request, and the time
        _element(body, "Region"),
        text,
        is_page=bool(re.search(r"(?i)<(!doctype )?html\b", body)),
    )


def server_message(failure: RequestFailure) -> str:
    """Status, code and message of the server in one clause."""
    said = "a page of HTML" if failure.is_page else failure.message
    return ", ".join(filter(None, (f"HTTP {failure.status} {failure.code}".strip(), said)))


def uses_no_proxy() -> bool:
    """Whether NO_PROXY turns every proxy of the environment off."""
    return "*" in map(str.strip, getproxies_environment().get("no", "").split(","))


def proxy_of(endpoint: str) -> str:
    """The proxy of the environment for an endpoint, without its credentials; ``""`` = none."""
    parts = urlsplit(endpoint)
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    if not proxy or uses_no_proxy() or proxy_bypass(parts.hostname or ""):
        return ""
    return re.sub(r"^(\w+://)?.*@", r"\1", proxy)


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1], {"&#34;": '"', "&quot;": '"', "&#39;": "'"}) if found else ""


class CloudFailures(abc.ABC):
    """The meaning of the answers of a cloud; each cloud defines its own codes."""

    _CREDENTIALS_HINT = ""
    """Hint for the case that obstore's own chain finds no credentials."""
    _BUCKET = "bucket"
    """The cloud's word for it."""
    _REASONS: ClassVar[Mapping[str, str]] = {}
    """Meanings of the codes with which the server denies access."""
    _FULL: ClassVar[frozenset[str]] = frozenset()
    """Other codes, by the kind of error that they stand for, as the next three."""
    _TAKEN: ClassVar[frozenset[str]] = frozenset()
    _BUSY: ClassVar[frozenset[str]] = frozenset()
    _BAD_NAMES: ClassVar[frozenset[str]] = frozenset({"InvalidBucketName"})

    def __init__(self, location: StorageLocation) -> None:
        self._location = location

    @property
    @abc.abstractmethod
    def _endpoint(self) -> str:
        """Return the endpoint for messages."""

    @property
    def _route(self) -> str:
        """The endpoint, and the proxy in front of it."""
        endpoint = self._endpoint
        proxy = proxy_of(endpoint if "://" in endpoint else "https://amazonaws.com")
        return f"{endpoint} (through the proxy {proxy})" if proxy else endpoint

    def _translate(self, error: Exception, action: str, name: str) -> StorageError | UsageError:
        failure = failure_of(error)
        place = f"{self._location.redacted().partition('?')[0]}/{name}".rstrip("/")
        what = f"cannot {action} {place}"
        if isinstance(error, UnauthenticatedError) and not failure.answered:
            # The source of credentials has failed; nothing was sent.
            cause = failure.text.partition("Debug source")[0].rpartition("StorageDenied: ")[2].strip()
            return StorageDenied(f"{what}: {cause}", hint=self._CREDENTIALS_HINT)
        if failure.lacks_credentials:
            cause = failure.text.partition("Debug source")[0].partition(" error: ")[2].strip()
            return StorageDenied(f"{what}: no credentials for {self._endpoint}: {cause}", hint=self._CREDENTIALS_HINT)
        return self._refusal(failure, what, place) if failure.answered else self._unanswered(failure, what)

    def _unanswered(self, failure: RequestFailure, what: str) -> StorageError:
        for mark, cause in _CONNECTION_CAUSES:
            if mark in failure.cause:
                return StorageUnreachable(f"{self._route} does not answer: {cause}")
        if failure.broken:
            return StorageUnreachable(f"{self._route} does not answer")
        first = failure.text.partition("Debug source")[0].partition(" error: ")[2].strip() or failure.text
        return StorageError(
            f"{what}: {self._route} does not answer as object storage does: {first}", hint=_NO_STORAGE_HINT
        )

    def _refusal(self, failure: RequestFailure, what: str, place: str) -> StorageError | UsageError:
        """Convert an error answer of the server; ``what`` is "cannot write ``place``" or the like."""
        if self._lacks_bucket(failure):
            return StorageObjectMissing(
                f"{self._BUCKET} {self._location.bucket!r} does not exist at {self._endpoint}",
                hint=f"Create the {self._BUCKET}, or check the URL.",
            )
        if failure.code in self._BAD_NAMES:
            return self._bad_name(failure, place)
        if HTTPStatus.MULTIPLE_CHOICES <= failure.status < HTTPStatus.BAD_REQUEST:
            said = f"redirects to another address (HTTP {failure.status}), which is not followed"
            return StorageError(f"{what}: {self._route} {said}", hint=_NO_STORAGE_HINT)
        if failure.is_page and failure.status == HTTPStatus.NOT_FOUND:
            return self._no_storage(what, server_message(failure))
        kind = self._kind_of(failure)
        if kind is StorageObjectMissing:
            return kind(f"{place} does not exist")
        if kind is StorageConflict:
            return kind(f"{place} already exists")
        reason = self._REASONS.get(failure.code)
        said = f"{reason} ({server_message(failure)})" if reason else server_message(failure)
        if failure.is_page or self._route != self._endpoint:
            said += f" from {self._route}"
        return kind(f"{what}: {said}", hint=UNKNOWN_HINT if kind is StorageError else None)

    def _kind_of(self, failure: RequestFailure) -> type[StorageError]:
        status, code = failure.status, failure.code
        if code in self._FULL or status == HTTPStatus.INSUFFICIENT_STORAGE:
            return StorageFull
        if code in self._REASONS or status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return StorageDenied
        if status == HTTPStatus.NOT_FOUND:
            return StorageObjectMissing
        if code in self._TAKEN or status == HTTPStatus.PRECONDITION_FAILED:
            return StorageConflict
        return StorageUnreachable if failure.is_transient or code in self._BUSY else StorageError

    def _no_storage(self, what: str, said: str) -> StorageError:
        return StorageError(f"{what}: {self._route} is no object storage: it answers {said}", hint=_NO_STORAGE_HINT)

    def _bad_name(self, failure: RequestFailure, _place: str) -> UsageError:
        return UsageError(
            f"{self._endpoint} refuses the bucket name {self._location.bucket!r}: {server_message(failure)}",
            hint=f"Check the bucket in the storage URL: {self._location.scheme}://BUCKET/prefix.",
        )

    def _lacks_bucket(self, failure: RequestFailure) -> bool:
        return failure.code == "NoSuchBucket"

    def _is_missing_object(self, failure: RequestFailure) -> bool:
        """Return whether a 404 means a missing object, not a missing bucket."""
        return failure.code in {"", "NoSuchKey"}
