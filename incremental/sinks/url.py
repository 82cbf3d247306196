"""The address of a sink: ``tikv://PD[,PD]?keyspace=…&api-version=…``, ``file:///path``, ``stdout://`` or ``-``, ``blackhole://``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from tikv_br.cluster.config import parse_addresses
from tikv_br.errors import ApiVersionMismatch, UsageError

FORMS = "tikv://PD[,PD], file:///PATH, - (or stdout://), blackhole://"


@dataclass(frozen=True, slots=True)
class TikvTarget:
    """A keyspace of a cluster."""

    pd: tuple[str, ...]
    keyspace: str = ""
    """Id or name; ``""`` = the source's."""
    api_version: ApiVersion | None = None
    """What the cluster must have; None = whatever it has."""
    below: bytes = b""
    """Put before each key. No address says it: what follows its own keyspace must not write into the range it follows."""

    def __str__(self) -> str:
        return f"tikv://{','.join(self.pd)}" + (f"?keyspace={self.keyspace}" if self.keyspace else "")

    def check(self, found: ApiVersion) -> None:
        """Compare what the cluster has. Raises `ApiVersionMismatch`."""
        if self.api_version is not None and self.api_version is not found:
            raise ApiVersionMismatch(
                f"{self} has API {found.label}, not {self.api_version.label}",
                hint="Correct api-version in --sink, or take the cluster that was meant.",
            )


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file of JSON lines."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class StdoutTarget:
    """JSON lines on standard output."""

    def __str__(self) -> str:
        return "stdout://"


@dataclass(frozen=True, slots=True)
class BlackholeTarget:
    """Nowhere."""

    def __str__(self) -> str:
        return "blackhole://"


Target = TikvTarget | FileTarget | StdoutTarget | BlackholeTarget


def parse(url: str) -> Target:
    """Read the address of a sink. Raises `UsageError` naming what is wrong."""
    if url == "-":
        return StdoutTarget()
    parts = urlsplit(url, allow_fragments=False)  # what follows a # would be dropped
    match parts.scheme:
        case "tikv":
            return _tikv(parts.netloc + parts.path.rstrip("/"), parts.query)
        case "file" if not parts.netloc and len(parts.path) > 1 and not parts.query:
            return FileTarget(Path(unquote(parts.path)))
        case "stdout" if not parts.netloc + parts.path.strip("/") + parts.query:
            return StdoutTarget()
        case "blackhole" if not parts.netloc + parts.path.strip("/") + parts.query:
            return BlackholeTarget()
    raise UsageError(f"--sink {url!r} is none of {FORMS}")


def check_shared(target: Target) -> None:
    """Refuse what several processes cannot write to together. Raises `UsageError`."""
    if not isinstance(target, TikvTarget | BlackholeTarget):
        raise UsageError(
            f"a changefeed cannot write to {target}: captures of several machines share the work",
            hint="Take --sink tikv://PD; `tikv-br sync` writes files.",
        )


def _tikv(addresses: str, query: str) -> TikvTarget:
    if "/" in addresses:
        raise UsageError(f"--sink: a tikv:// address has no path, only PD addresses: {addresses!r}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - {"keyspace", "api-version"}
    if unknown:
        raise UsageError(f"--sink: tikv:// knows no {', '.join(sorted(unknown))}: keyspace and api-version are all")
    label = options.get("api-version")
    try:
        version = ApiVersion.from_label(label) if label is not None else None
    except UnsupportedFormat as error:
        raise UsageError(f"--sink: {error}") from None
    return TikvTarget(parse_addresses(addresses), options.get("keyspace", ""), version)
