"""The TLS files of a cluster, what they hold, and why a handshake with a server fails."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field

from tikv_br.errors import ClusterTlsError, UsageError

PROBE_TIMEOUT = 3.0
"""Seconds that `explain_failure` waits for a server; it only words a message."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: the authority that signed the servers, and our own certificate with its key (mutual TLS).

    TLS is on when `ca` is given. The key's path never shows in messages or in the repr.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError("--cert and --key go together")
        if self.cert is not None and self.ca is None:
            raise UsageError("--cert and --key need --ca")

    @property
    def enabled(self) -> bool:
        """Whether connections use TLS."""
        return self.ca is not None

    @property
    def scheme(self) -> str:
        """``https`` or ``http``, for the servers' HTTP ports."""
        return "https" if self.enabled else "http"

    def read(self) -> TlsPem:
        """The files' contents, for gRPC. Raises `UsageError` for an unreadable file."""
        return TlsPem(_read("--ca", self.ca), _read("--cert", self.cert), _read("--key", self.key))

    def ssl_context(self) -> ssl.SSLContext:
        """What Python's own TLS needs. Raises `UsageError` or `ClusterTlsError` for files that cannot be used."""
        self.read()  # says which file is unreadable, which ssl does not
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        except ssl.SSLError as error:
            raise ClusterTlsError(f"--ca holds no usable certificate: {_reason(error)}") from None
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            except ssl.SSLError as error:
                raise ClusterTlsError(f"--cert and --key cannot be used together: {_reason(error)}") from None
        return context


@dataclass(frozen=True, slots=True)
class TlsPem:
    """Contents of `TlsFiles`; never shown."""

    ca: bytes | None = field(repr=False)
    cert: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)


def explain_failure(host: str, port: int, files: TlsFiles, timeout: float = PROBE_TIMEOUT) -> str | None:
    """Why TLS with this server fails, in words; None when TLS is not what is wrong.

    gRPC says UNAVAILABLE for everything. This does one handshake of its own, and reads one byte: a server of TLS 1.3
    refuses our certificate only after the handshake, and one that accepts it speaks first.
    """
    context = files.ssl_context() if files.enabled else _unverified_context()
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=timeout) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            if not files.enabled:
                return "the server speaks TLS, and no --ca was given"
            return _explain_refusal(secured, files)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return _explain(error) if files.enabled else None
    except OSError:
        return None


def _explain_refusal(secured: ssl.SSLSocket, files: TlsFiles) -> str | None:
    """What the server says after the handshake, if it does not like our certificate or the lack of one."""
    try:
        if secured.recv(1):
            return None
        reason = "it hung up"
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        reason = _reason(error)
    except OSError:
        reason = "it hung up"
    wish = "wants a certificate of ours (--cert, --key)" if files.cert is None else "refuses our certificate"
    return f"the server {wish}: {reason}"


def _explain(error: ssl.SSLError) -> str:
    reason = _reason(error)
    no_tls = ("wrong version number", "unexpected eof", "record layer failure")
    return "the server does not speak TLS" if any(sign in reason for sign in no_tls) else reason


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM file").replace("_", " ").lower()


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _read(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path given by the user, read as is
            return file.read()
    except OSError as error:
        raise UsageError(f"{flag}: the file cannot be read: {error.strerror}") from None


def _no_password() -> str:
    """Keep OpenSSL from asking on the terminal."""
    raise ClusterTlsError("--key is protected by a password, which is not supported")
