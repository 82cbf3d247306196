"""The address of a sink, such as ``tikv://PD``: parsed and checked without loading what writes to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from tikv_br.archive.records import check_id
from tikv_br.cluster.config import parse_addresses
from tikv_br.errors import ApiVersionMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.incremental.kafka import url as kafka_url
from tikv_br.incremental.kafka.url import KafkaUrl, split_url
from tikv_br.storage.url import StorageLocation
from tikv_br.storage.url import parse as parse_location

FORMS = (
    "tikv://PD[,PD], s3://BUCKET/PREFIX, gcs://BUCKET/PREFIX, azure://CONTAINER/PREFIX or local:///DIR (a log archive), "
    "kafka://HOST:PORT[,HOST:PORT]/TOPIC, file:///PATH, - (or stdout://), blackhole://"
)

_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


@dataclass(frozen=True, slots=True)
class TikvTarget:
    """A keyspace of a cluster."""

    pd: tuple[str, ...]
    keyspace: str | int = ""
    """Id or name; ``""`` = the source's. A number is not looked up in PD."""
    api_version: ApiVersion | None = None
    """Required API version; None = any."""

    def __str__(self) -> str:
        return f"tikv://{','.join(self.pd)}" + (f"?keyspace={self.keyspace}" if self.keyspace != "" else "")

    def check(self, found: ApiVersion) -> None:
        """Compare with the API version of the cluster. Raises `ApiVersionMismatch`."""
        if self.api_version is not None and self.api_version is not found:
            raise ApiVersionMismatch(
                f"{self} has API {found.label}, not {self.api_version.label}",
                hint="Correct api-version in --sink, or pass the address of the intended cluster.",
            )


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file of JSON lines."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class LogTarget:
    """A log archive."""

    location: StorageLocation
    log_id: str = ""
    """``""`` = the id of the sync."""
    flush_interval: float = 30.0
    """Interval of flushes, in seconds."""
    flush_size: int = 64 << 20
    """Bytes of changes after which they are written before that."""
    rate_limit: int = 0
    """Maximum upload rate in bytes per second; 0 = unlimited. Not part of the address."""

    def __str__(self) -> str:
        """An address without credentials, of which `parse` makes the same target."""
        options = [f"flush-interval={self.flush_interval:g}s", f"flush-size={self.flush_size}"]
        if self.log_id:
            options.append(f"id={self.log_id}")
        place = self.location.redacted()
        return f"{place}{'&' if '?' in place else '?'}{'&'.join(options)}"

    def id_for(self, changefeed_id: str) -> str:
        """The id of the log that a sync or changefeed writes. Raises `UsageError` for an invalid one."""
        return check_id(self.log_id or changefeed_id)


@dataclass(frozen=True, slots=True)
class StdoutTarget:
    """JSON lines on standard output."""

    def __str__(self) -> str:
        return "stdout://"


@dataclass(frozen=True, slots=True)
class BlackholeTarget:
    """Discards all changes."""

    def __str__(self) -> str:
        return "blackhole://"


Target = TikvTarget | LogTarget | KafkaUrl | FileTarget | StdoutTarget | BlackholeTarget


def parse(url: str, locate: Callable[[str], StorageLocation] = parse_location) -> Target:
    """Parse the address of a sink; `locate` reads the address of a storage. Raises `UsageError`."""
    if url == "-":
        return StdoutTarget()
    try:
        parts = split_url(url)
    except UsageError as error:
        raise UsageError(f"--sink: {error.message}", hint=f"Pass one of {FORMS}.") from None
    match parts.scheme:
        case "tikv":
            return _tikv(parts.netloc + parts.path.rstrip("/"), parts.query)
        case "file" if not parts.netloc and len(parts.path) > 1 and not parts.query:
            return FileTarget(Path(unquote(parts.path)))
        case "s3" | "gcs" | "gs" | "azure" | "azblob" | "local":
            return _log(url, locate)
        case "kafka":
            return _kafka(url)
        case "stdout" if not parts.netloc + parts.path.strip("/") + parts.query:
            return StdoutTarget()
        case "blackhole" if not parts.netloc + parts.path.strip("/") + parts.query:
            return BlackholeTarget()
    raise UsageError(f"--sink {url!r} is not a valid address", hint=f"Pass one of {FORMS}.")


def check_shared(target: Target) -> None:
    """Refuse a target that several processes cannot write to. Raises `UsageError`."""
    is_shared = isinstance(target, TikvTarget | KafkaUrl | BlackholeTarget)
    if not is_shared and not (isinstance(target, LogTarget) and target.location.is_cloud):
        raise UsageError(
            f"a changefeed cannot write to {target}, because captures on several machines share the work",
            hint="Pass --sink tikv://PD, kafka://HOST:PORT/TOPIC, s3://BUCKET/PREFIX or another cloud, or use `tikv-br sync`, which writes files.",
        )
    if isinstance(target, KafkaUrl) and target.password_in_address:
        raise UsageError(
            "the address of a changefeed's sink must not contain a password, because it is saved in etcd",
            hint=f"Set {kafka_url.PASSWORD_VARIABLE} in the environment of this command and of every capture.",
        )
    if isinstance(target, LogTarget) and (target.location.has_secrets or target.location.gcs.credentials_file):
        raise UsageError(
            "the address of a changefeed's sink must not contain credentials: it is saved in etcd",
            hint="Let the captures find them in the environment (AWS_ACCESS_KEY_ID, AZURE_STORAGE_KEY, GOOGLE_APPLICATION_CREDENTIALS …), "
            "a profile, or the role or identity of their machines.",
        )


def _log(address: str, locate: Callable[[str], StorageLocation]) -> LogTarget:
    place, _, query = address.partition("?")
    options: dict[str, str] = {}
    rest = []
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name.replace("_", "-") in {"id", "flush-interval", "flush-size"}:
            options[name.replace("_", "-")] = unquote(value)
        else:
            rest.append(part)
    try:
        location = locate(place + ("?" + "&".join(rest) if rest else ""))
        interval = _quantity("flush-interval", options.get("flush-interval", "30s"), _SECONDS)
        size = _quantity("flush-size", options.get("flush-size", "64MiB"), _BYTES)
    except UsageError as error:
        raise UsageError(f"--sink: {error.message}", hint=error.hint) from None
    return LogTarget(location, options.get("id", ""), interval, round(size))


def _kafka(address: str) -> KafkaUrl:
    try:
        return kafka_url.parse(address)
    except UsageError as error:
        raise UsageError(f"--sink: {error.message}", hint=error.hint) from None


def _quantity(name: str, text: str, units: Mapping[str, float]) -> float:
    """A positive number with a unit. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    value = float(found[1]) * units[found[2]] if found and found[2] in units else 0.0
    if value <= 0:
        raise UsageError(
            f"{name}={text} is not valid", hint=f"Pass a number and one of {', '.join(filter(None, units))}."
        )
    return value


def _tikv(addresses: str, query: str) -> TikvTarget:
    if "/" in addresses:
        raise UsageError(
            f"--sink: the tikv:// address {addresses!r} has a path", hint="Pass only PD addresses: tikv://PD[,PD]."
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - {"keyspace", "api-version"}
    if unknown:
        raise UsageError(
            f"--sink: tikv:// does not support the option {', '.join(sorted(unknown))}",
            hint="Supported options are keyspace and api-version.",
        )
    label = options.get("api-version")
    try:
        version = ApiVersion.from_label(label) if label is not None else None
    except UnsupportedFormat as error:
        raise UsageError(f"--sink: {error}") from None
    return TikvTarget(parse_addresses(addresses), options.get("keyspace", ""), version)
