"""Readers of the places that are shown. Each is independent, so that one that does not answer hides no other."""

from __future__ import annotations

import json
import math
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import IO, Any, Protocol, TypeVar

from msgspec.structs import replace

from tikv_br.archive.log import LogArchive, LogSource
from tikv_br.archive.maintenance import LogStatus, status_of
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, IndexEntry, ListedBackup
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.dataflow.read import scanned_ts
from tikv_br.drill.history import REPORTS, PastDrill, read_past_drills
from tikv_br.errors import TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.gc.status import GcReport, read_report
from tikv_br.redaction import redact
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

MAX_WINDOWS = 50
"""Backups of one storage, the newest, whose restorable windows are found: each needs its manifest once."""
MAX_STATUS = 4 << 20
"""Bytes of the answer of a status page."""
STATUS_TIMEOUT = 5.0
CLUSTER_SECONDS = 10.0
"""Seconds of retries before PD's section shows the error."""

_STOPPED = (
    "Is the sync running? If it was stopped, run its command again: it resumes from its checkpoint, and until then its safe point "
    "holds GC back for --gc-ttl. If it runs, check its --status-addr and firewalls. If it is no longer needed, remove its --status here."
)
_NO_STATUS = "Pass as --status the --status-addr of `sync`, `log start` or `changefeed capture`."

T_co = TypeVar("T_co", covariant=True)


class ShownSource(Protocol[T_co]):
    """A place that one thread polls."""

    @property
    def place(self) -> str:
        """Address without credentials."""

    def read(self) -> T_co:
        """Read the current state. Raises `TikvBrError`."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Properties of a backup that its restorable window depends on, besides the log."""

    cluster_id: int
    ranges: tuple[KeyRange, ...]
    """Backed-up ranges, as RPC keys."""
    backup_ts: int
    scanned_ts: int
    """Timestamp after all of its rows were read."""


@dataclass(frozen=True, slots=True)
class Backups:
    """Backups of one storage."""

    root: StorageLocation
    listed: tuple[ListedBackup, ...]
    """All backups, the newest first."""
    baselines: Mapping[str, Baseline | str]
    """Baselines by id of backups that a log can continue; a text = the error of reading one."""


class BackupsSource:
    """The index of the backups at a root."""

    def __init__(self, root: StorageLocation, *, windows: bool) -> None:
        """`windows`: whether to read what the restorable windows need."""
        self._root, self._windows = root, windows
        self._known: dict[str, Baseline] = {}

    @property
    def place(self) -> str:
        return self._root.redacted()

    def read(self) -> Backups:
        """Read the index, and the manifests of new backups."""
        listed = tuple(Index(open_store(self._root)).read())
        wanted = [each.entry for each in listed if can_have_window(each.entry)] if self._windows else []
        found: dict[str, Baseline | str] = {}
        for entry in wanted[:MAX_WINDOWS]:
            try:
                found[entry.id] = self._known.get(entry.id) or self._baseline(entry)
            except TikvBrError as error:
                found[entry.id] = redact(error.message)
        self._known = {name: each for name, each in found.items() if isinstance(each, Baseline)}
        return Backups(self._root, listed, found)

    def _baseline(self, entry: IndexEntry) -> Baseline:
        """Read the baseline of a backup. Raises as `BackupSet.open`."""
        backup = BackupSet.open(open_store(self._root.child(entry.path)))
        return Baseline(backup.cluster_id, backup.ranges, backup.backup_ts, scanned_ts(backup))


def can_have_window(entry: IndexEntry) -> bool:
    """Return whether a log archive may continue a backup: its rows must be of RawKV, and have timestamps."""
    is_raw_v2 = entry.dst_api_version is ApiVersion.V2 and entry.key_mode is KeyMode.RAW
    return is_raw_v2 and bool(entry.backup_ts) and not entry.is_foreign


@dataclass(frozen=True, slots=True)
class Log:
    """A log archive."""

    archive: LogArchive
    status: LogStatus


class ArchiveSource:
    """Reader of a log archive."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._last: LogArchive | None = None

    @property
    def place(self) -> str:
        """Location without credentials, and the log's id."""
        return f"{self._source.storage.redacted()} (log {self._source.id})"

    def read(self) -> Log:
        """Read the records that are new since the last time."""
        known = () if self._last is None else (*self._last.segments, *self._last.replaced)
        self._last = LogArchive.open(open_store(self._source.storage), self._source.id, known)
        return Log(self._last, status_of(self._last))


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync, log archive or changefeed, as the process that runs it reports it."""

    name: str
    trouble: str
    """Reason why the sync is unhealthy; empty if it is healthy."""
    degraded: str
    """Reason why it may soon become unhealthy; empty if none."""
    checkpoint_lag: float | None
    """Seconds; None = it has not started."""
    write_lag: float | None
    """Seconds; None = there are no writes."""
    events_per_second: float
    written: int
    source: str = ""
    """The cluster that it follows; empty = the process does not say."""
    sink: str = ""


class StatusSource:
    """The status page of a process that runs syncs: ``sync``, ``log start`` or ``changefeed capture``."""

    def __init__(self, url: str, key: SecretText, ca: str | None = None) -> None:
        """`url`: see `tikv_br.serve.access.parse_status_url`; `ca`: for https. Raises `UsageError` for an unusable `ca`."""
        self._url = url
        self._key = key
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
        if url.startswith("https:"):
            context = TlsFiles(ca).ssl_context() if ca else ssl.create_default_context()
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def place(self) -> str:
        return self._url

    def read(self) -> tuple[Sync, ...]:
        """Ask for ``/status``. Raises `TikvBrError`."""
        headers = {"Authorization": f"Bearer {self._key.reveal()}"} if self._key else {}
        request = urllib.request.Request(f"{self._url}/status", headers=headers)  # noqa: S310 - http or https
        try:
            with self._opener.open(request, timeout=STATUS_TIMEOUT) as answer:
                body: bytes = answer.read(MAX_STATUS + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code) from None
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise TikvBrError(f"{self._url} does not answer: {reason}", hint=_STOPPED) from None
        if len(body) > MAX_STATUS:
            raise TikvBrError(f"{self._url}/status is larger than {MAX_STATUS} bytes", hint=_NO_STATUS)
        try:
            return tuple(_sync(each) for each in json.loads(body)["syncs"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise TikvBrError(f"{self._url}/status is not the status of syncs: {error}", hint=_NO_STATUS) from None

    def _refused(self, code: int) -> TikvBrError:
        if code == HTTPStatus.UNAUTHORIZED:
            return TikvBrError(
                f"{self._url} requires its status key", hint="Pass the key's file with --status-key-file."
            )
        return TikvBrError(f"{self._url}/status: HTTP {code}", hint=_NO_STATUS)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address must not get the key."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,  # noqa: ANN401
        newurl: str,
    ) -> None:
        """Return None, so that redirects are errors."""


def _sync(value: Mapping[str, Any]) -> Sync:
    """Parse one sync of ``/status``. Raises `TypeError`, `ValueError`, `KeyError` if it is invalid."""
    status = value["status"]
    lag, write_lag, rate, written = (None, None, 0.0, 0)
    if status is not None:
        lag, rate, written = (
            _number(status["checkpoint_lag"]),
            _number(status["events_per_second"]),
            int(status["written"]),
        )
        write_lag = None if status["write_lag"] is None else _number(status["write_lag"])
    return Sync(
        name=str(value["name"]),
        trouble=redact(str(value["trouble"])),
        degraded=redact(str(value.get("degraded", ""))),
        checkpoint_lag=lag,
        write_lag=write_lag,
        events_per_second=rate,
        written=written,
        source=redact(str(value.get("source", ""))),
        sink=redact(str(value.get("sink", ""))),
    )


def _number(value: object) -> float:
    """Return the value as a float; it must be a finite number. Raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


class DrillSource:
    """The reports of drills."""

    def __init__(self, home: StorageLocation) -> None:
        self._home = home

    @property
    def place(self) -> str:
        """Location of the drills' home, without credentials."""
        return self._home.redacted()

    def read(self) -> tuple[PastDrill, ...]:
        """All drills, the oldest first."""
        return read_past_drills(open_store(self._home))

    def report(self, drill: str) -> bytes:
        """The page of a drill. Raises `StorageError`."""
        return open_store(self._home).get(f"{REPORTS}/{drill}.html")


class GcSource:
    """The safe points in PD."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = replace(config, retry_budget=CLUSTER_SECONDS)

    @property
    def place(self) -> str:
        return ", ".join(self._config.pd)

    def read(self) -> GcReport:
        return read_report(self._config)
