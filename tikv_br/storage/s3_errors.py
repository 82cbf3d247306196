"""What an S3 request ended with, as one of our errors.

obstore raises a class by HTTP status and puts the answer's XML, or the cause of a broken connection, in its text. The text
may hold session tokens (S3 repeats the signed headers in some refusals), so only the parts known to be harmless are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.sax.saxutils import unescape

from obstore.exceptions import UnauthenticatedError

from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.storage.url import DEFAULT_REGION, StorageLocation

_REASONS = {
    "InvalidAccessKeyId": "the access key is unknown",
    "XAdminUserNotFound": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret access key does not belong to the access key",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's",
    "AccessDenied": "the credentials lack the right",
    "AllAccessDisabled": "access to the bucket is disabled",
    "InvalidObjectState": "the object lies in an archive and must be brought back first",
}
_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_FULL = {"QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientStorage", "QuotaExceededException"}
_TAKEN = {"PreconditionFailed"}
TWO_AT_ONCE = "ConditionalRequestConflict"
"""Two conditional writes of one object met: neither need have succeeded, and both are to try again."""
_MOVED = 301
_REFUSALS = {401, 403}
_NOT_FOUND = 404
_PRECONDITION_FAILED = 412
_OVERLOADED = {429, 500, 502, 503, 504}
_INSUFFICIENT_STORAGE = 507
_UNKNOWN_HINT = "The message is the endpoint's own; check the request and the endpoint's log against it."
_CONNECTION_CAUSES = (
    ("Connection refused", "connection refused"),
    ("dns error", "the host name does not resolve"),
    ("InvalidContentType", "the endpoint speaks no TLS; is it an http:// one?"),
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
class S3Failure:
    """The parts of a failed request that decide and that may be shown."""

    status: int
    """HTTP status; 0 = no answer came."""
    code: str
    message: str
    region: str
    """The region that the server says is right."""
    text: str
    """All of it, not for showing."""

    @property
    def answered(self) -> bool:
        """Whether the server said anything at all."""
        return self.status != 0


def failure_of(error: Exception) -> S3Failure:
    """Read what obstore says of a failed request."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = _element(text, "Code")
    if "without LOCATION" in text:  # a redirect to the bucket's true region
        return S3Failure(_MOVED, "PermanentRedirect", "", "", text)
    return S3Failure(int(status[1]) if status else 0, code, _element(text, "Message"), _element(text, "Region"), text)


def translate(error: Exception, location: StorageLocation, action: str, name: str) -> StorageError:
    """The error of ours for a request that obstore gave up: ``action`` as in "cannot <action> <name>"."""
    failure = failure_of(error)
    place = f"{location.redacted().partition('?')[0]}/{name}".rstrip("/")
    if isinstance(error, UnauthenticatedError) and not failure.answered:
        # The source of credentials has failed; nothing was sent.
        cause = failure.text.partition("Debug source")[0].rpartition("StorageDenied: ")[2].strip()
        return StorageDenied(f"cannot {action} {place}: {cause}")
    if not failure.answered:
        return _unanswered(failure, location, f"cannot {action} {place}")
    if failure.code == "NoSuchBucket":
        return StorageObjectMissing(
            f"bucket {location.bucket!r} does not exist at {_endpoint(location)}",
            hint="Create the bucket, or check the URL.",
        )
    if failure.code in _WRONG_REGION or failure.status == _MOVED:
        return _wrong_region(failure, location)
    kind = _kind_of(failure)
    if kind is StorageObjectMissing:
        return kind(f"{place} does not exist")
    if kind is StorageConflict:
        return kind(f"{place} exists already")
    reason = _REASONS.get(failure.code, "")
    said = f"{reason} ({_said(failure)})" if reason else _said(failure)
    return kind(f"cannot {action} {place}: {said}", hint=_UNKNOWN_HINT if kind is StorageError else None)


def _kind_of(failure: S3Failure) -> type[StorageError]:
    status, code = failure.status, failure.code
    if code in _FULL or status == _INSUFFICIENT_STORAGE:
        return StorageFull
    if code in _REASONS or status in _REFUSALS:
        return StorageDenied
    if status == _NOT_FOUND:
        return StorageObjectMissing
    if code in _TAKEN or status == _PRECONDITION_FAILED:
        return StorageConflict
    return StorageUnreachable if status in _OVERLOADED or code == TWO_AT_ONCE else StorageError


def _unanswered(failure: S3Failure, location: StorageLocation, what: str) -> StorageError:
    for mark, cause in _CONNECTION_CAUSES:
        if mark in failure.text:
            return StorageUnreachable(f"{_endpoint(location)} does not answer: {cause}")
    if "HTTP error" in failure.text:
        return StorageUnreachable(f"{_endpoint(location)} does not answer")
    first = failure.text.partition("Debug source")[0].strip()
    return StorageError(f"{what}: {first}", hint="Check the URL and the storage's settings.")


def _wrong_region(failure: S3Failure, location: StorageLocation) -> StorageError:
    said = location.s3.region or DEFAULT_REGION
    right = f"in region {failure.region!r}, not {said!r}" if failure.region else f"not in region {said!r}"
    hint = f"Set --s3.region {failure.region}." if failure.region else "Set --s3.region to the bucket's region."
    return StorageDenied(f"bucket {location.bucket!r} is {right}", hint=hint)


def _said(failure: S3Failure) -> str:
    """Status, code and message of the server in one clause."""
    return ", ".join(filter(None, (f"HTTP {failure.status} {failure.code}".strip(), failure.message)))


def _endpoint(location: StorageLocation) -> str:
    return location.s3.endpoint or f"Amazon S3 in {location.s3.region or DEFAULT_REGION}"


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1], {"&#34;": '"', "&quot;": '"', "&#39;": "'"}) if found else ""
