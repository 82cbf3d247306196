"""A failed request to a cloud, as obstore reports it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.sax.saxutils import unescape

OVERLOADED = {429, 500, 502, 503, 504}
MOVED = 301
REFUSED_RANGE = 416
_NOT_DONE = {429, 500, 503}
_UNSENT = "Connect"
"""obstore's kind of a failure before anything was sent."""


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
    lacks_credentials: bool = False
    """True if the service that issues credentials failed; nothing was sent to the storage."""

    @property
    def answered(self) -> bool:
        return self.status != 0

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed a moment later."""
        return bool(self.broken) if not self.answered else self.status in OVERLOADED

    @property
    def had_no_effect(self) -> bool:
        """Return whether the request certainly had no effect: it was not sent, or the server reported its failure."""
        return self.broken == _UNSENT or self.status in _NOT_DONE


def failure_of(error: Exception) -> RequestFailure:
    """Read what obstore says of a failed request.

    Only in the report of the cause that obstore appends, and by marks that begin on lines of their own: names of buckets and
    objects, which stand elsewhere in the text, cannot contain a line break.
    """
    text = str(error)
    if re.search(r"\n\s*inner: BareRedirect", text):  # to the bucket's true region
        return RequestFailure(MOVED, "PermanentRedirect", "", "", text)
    if re.search(r"\n\s*source: (TokenRequest|Credential|AzureCli) \{\n", text):
        return RequestFailure(0, "", "", "", text, lacks_credentials=True)
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
        _message(_element(body, "Message")),
        _element(body, "Region"),
        text,
    )


def server_message(failure: RequestFailure) -> str:
    """Status, code and message of the server in one clause."""
    return ", ".join(filter(None, (f"HTTP {failure.status} {failure.code}".strip(), failure.message)))


def _message(text: str) -> str:
    """The server's message without the lines that Azure adds: the id of the request, and the time."""
    return text.partition("\\nRequestId:")[0].strip()


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1], {"&#34;": '"', "&quot;": '"', "&#39;": "'"}) if found else ""
