"""How to reach a cluster, as one value that travels to Spark tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import UsageError

MAX_PORT = 65535
REQUEST_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Addresses, TLS files and limits. All times are in seconds.

    Build it from flags with `from_flags`; it pickles, so that Spark tasks connect as the driver does.
    """

    pd: tuple[str, ...]
    """PD addresses as ``host:port``; any one that answers leads to the others."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    connect_timeout: float = 5.0
    """How long PD's members may take to say who leads; while they say that nobody does, they are asked again for `retry_budget`."""
    request_timeout: float = REQUEST_TIMEOUT
    """How long one request may take; streams have no such limit."""
    retry_budget: float = 20.0
    """How long one call goes on after its first failure."""
    busy_budget: float = 600.0
    """How long one call may wait, on top of `retry_budget`, for stores that say they are busy."""

    @classmethod
    def from_flags(
        cls, pd: str | Sequence[str], *, ca: str | None = None, cert: str | None = None, key: str | None = None
    ) -> ClusterConfig:
        """Config of ``--pd host:port,host:port --pd host:port --ca FILE --cert FILE --key FILE``. Raises `UsageError`."""
        return cls(
            pd=parse_addresses(pd if isinstance(pd, str) else ",".join(pd)), tls=TlsFiles(ca=ca, cert=cert, key=key)
        )


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How to reach etcd: PD's own, at the addresses of PD, or another."""

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
        raise UsageError(f"no PD address in {text!r}: host:port[,host:port...]")
    for address in addresses:
        split_address(address)
    return addresses


def bare_address(url: str) -> str:
    """``host:port`` of a URL such as PD's client URLs."""
    return url.partition("://")[2].split("/")[0] if "://" in url else url.rstrip("/")


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``host:port``. Raises `UsageError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise UsageError(f"{address!r} is no address of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
