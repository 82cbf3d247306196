"""Settings for connecting to a cluster, picklable for Spark tasks: addresses, timeouts and TLS files."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tikv_br.errors import ClusterTlsError, UsageError
from tikv_br.formats.numbers import parse_decimal
from tikv_br.retry import RetryPolicy

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
            raise UsageError("--cert and --key must be passed together")
        if self.cert is not None and self.ca is None:
            raise UsageError("--cert and --key require --ca")

    @property
    def enabled(self) -> bool:
        return self.ca is not None

    @property
    def scheme(self) -> str:
        """``https`` or ``http``, for the servers' HTTP ports."""
        return "https" if self.enabled else "http"

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of authority, certificate and key, for gRPC. Raises `UsageError` for an unreadable file."""
        return _read("--ca", self.ca), _read("--cert", self.cert), _read("--key", self.key)

    def ssl_context(self) -> ssl.SSLContext:
        """Return the files as a context of Python's `ssl`.

        Raises `UsageError` or `ClusterTlsError` for unusable files.
        """
        self.read()  # its error names the unreadable file; the one of ssl does not
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        except ssl.SSLError as error:
            raise ClusterTlsError(f"--ca contains no usable certificate: {_reason(error)}") from None
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            except ssl.SSLError as error:
                raise ClusterTlsError(f"--cert and --key cannot be used together: {_reason(error)}") from None
        return context


def explain_failure(host: str, port: int, files: TlsFiles, timeout: float = PROBE_TIMEOUT) -> str | None:
    """Describes why TLS with this server fails; None if TLS is not the cause.

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
                return "the server uses TLS, but --ca was not passed"
            return _explain_refusal(secured, files)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return _explain(error) if files.enabled else None
    except OSError:
        return None


def _explain_refusal(secured: ssl.SSLSocket, files: TlsFiles) -> str | None:
    """Return why the server refuses the client certificate or its absence; None if it accepts it."""
    try:
        if secured.recv(1):
            return None
        reason = "it closed the connection"
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        reason = _reason(error)
    except OSError:
        reason = "it closed the connection"
    problem = "requires a client certificate (--cert, --key)" if files.cert is None else "refuses our certificate"
    return f"the server {problem}: {reason}"


def _explain(error: ssl.SSLError) -> str:
    reason = _reason(error)
    no_tls = ("wrong version number", "unexpected eof", "record layer failure")
    return "the server does not use TLS" if any(sign in reason for sign in no_tls) else reason


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not a PEM file").replace("_", " ").lower()


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
        raise UsageError(f"{flag}: cannot read the file: {error.strerror}") from None


def _no_password() -> str:
    """Keep OpenSSL from asking on the terminal."""
    raise ClusterTlsError("--key is protected by a password, which is not supported")


MAX_PORT = 65535
REQUEST_TIMEOUT = 30.0


class ClusterConfig(msgspec.Struct, frozen=True):
    """Addresses, TLS files and limits. All times are in seconds.

    Build it from flags with `from_flags`; it pickles, so that Spark tasks connect as the driver does.
    """

    pd: tuple[str, ...]
    """PD addresses as ``host:port``; any one that answers leads to the others."""
    tls: TlsFiles = msgspec.field(default_factory=TlsFiles)
    connect_timeout: float = 5.0
    """Seconds for PD's members to name the leader; the answer that there is none is retried for `retry_budget`."""
    request_timeout: float = REQUEST_TIMEOUT
    """Timeout of one request, in seconds; streams have none."""
    retry_budget: float = 60.0
    """Seconds for retries of one call, with all its requests.

    A dead leader is replaced within 10 to 50 s; PD reports the store as gone after 20 s.
    """
    busy_budget: float = 600.0
    """Seconds that one call may wait for busy stores, in addition to `retry_budget`."""
    skip_version_check: bool = False
    """Also use stores of versions that `tikv_br.cluster.versions` refuses."""

    @property
    def retry(self) -> RetryPolicy:
        """The policy of all calls to this cluster."""
        return RetryPolicy(self.retry_budget, self.busy_budget)

    @classmethod
    def from_flags(
        cls,
        pd: str | Sequence[str],
        *,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        skip_version_check: bool = False,
    ) -> ClusterConfig:
        """Config of ``--pd host:port,host:port --pd host:port --ca FILE --cert FILE --key FILE``. Raises `UsageError`."""
        text, tls = pd if isinstance(pd, str) else ",".join(pd), TlsFiles(ca=ca, cert=cert, key=key)
        check_schemes(text, tls, "--pd", "--ca")
        return cls(pd=parse_addresses(text), tls=tls, skip_version_check=skip_version_check)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Settings for connecting to etcd: the one inside PD, at PD's addresses, or another."""

    endpoints: tuple[str, ...]
    """Members as ``host:port``; one after the other is asked until one answers."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"etcd://{','.join(self.endpoints)}"


def parse_addresses(text: str) -> tuple[str, ...]:
    """Addresses of a comma-separated list, with or without ``http(s)://``, each once. Raises `UsageError`."""
    addresses = tuple(dict.fromkeys(bare_address(part.strip()) for part in text.split(",") if part.strip()))
    if not addresses:
        raise UsageError(f"no PD address in {text!r}: expected host:port[,host:port...]")
    for address in addresses:
        split_address(address)
    return addresses


def check_schemes(text: str, tls: TlsFiles, name: str, ca: str) -> None:
    """Raise `UsageError` for an address that asks for TLS if there is none."""
    secured = [part.strip() for part in text.split(",") if part.strip().startswith("https://")]
    if secured and not tls.enabled:
        raise UsageError(
            f"{name} {secured[0]} asks for TLS, but {ca} was not passed",
            hint=f"Pass {ca} FILE, the certificate of the authority that signed the server's. Without TLS, write http:// or no scheme.",
        )


def bare_address(url: str) -> str:
    """``host:port`` of a URL such as PD's client URLs."""
    return url.partition("://")[2].split("/")[0] if "://" in url else url.rstrip("/")


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``host:port``. Raises `UsageError`."""
    host, _, digits = address.rpartition(":")
    port = parse_decimal(digits, MAX_PORT)
    if not host or not port:
        raise UsageError(f"{address!r} is not an address of the form host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(
            f"{address!r} is not an address of the form host:port",
            hint=f"Write an IPv6 address in brackets: [{host}]:{port}.",
        )
    return host.removeprefix("[").removesuffix("]"), port
