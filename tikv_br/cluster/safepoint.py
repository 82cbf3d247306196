"""Service safe points, which hold back GC while a backup or a change feed runs, and the choice of backup-ts."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from tikv_br import cancellation
from tikv_br.cancellation import BackgroundWork
from tikv_br.cluster.timestamps import minus_seconds, show_ts
from tikv_br.errors import SafePointError, TikvBrError, UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.pd import PdClient
    from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3
RENEW_SECONDS = 60.0
"""Longest interval between renewals by a live run, whatever its TTL: `gc release` relies on it."""
SILENCE_SECONDS = 10.0
"""Seconds of silence of PD, as during an election, before it is reported."""
WARN_SECONDS = 60.0
"""Interval of log messages about the silence."""
PROBE_SECONDS = 10.0
"""Interval at which a backup asks PD for the GC safe point."""
OTHER_GC_HINT = (
    "Nothing that was read since then is complete. Programs that do GC without regard to service safe points are JuiceFS "
    "(gc-interval), others that use client-go's GC, and TiDB once a safe point has expired. Turn their GC off until the backup has "
    "ended (JuiceFS: gc-interval=0), or give it a longer life time than a backup takes; then run the same command again: it starts over."
)
"""The hint if GC has passed the safe point of a backup."""


def protect(pd: PdClient, service_id: str, safe_point: int, ttl_seconds: int, hint: str | None = None) -> None:
    """Register or renew a service safe point. Raises `SafePointError` when GC has already passed it."""
    _check_passed(
        max(pd.update_service_safe_point(service_id, ttl_seconds, safe_point), pd.gc_safe_point()),
        safe_point,
        service_id,
        hint,
    )


def _check_passed(passed: int, safe_point: int, service_id: str, hint: str | None) -> None:
    """Raise `SafePointError` if GC, which is at ``passed``, has passed a service's safe point."""
    if passed > safe_point:
        raise SafePointError(
            f"GC is at {show_ts(passed)} and has passed {show_ts(safe_point)}, the safe point of {service_id}",
            hint=hint,
        )


def release(pd: PdClient, service_id: str) -> None:
    """Remove a service safe point; it need not exist."""
    pd.update_service_safe_point(service_id, 0, 0)


def describe_silence(seconds: float) -> str:
    """Message about a PD that has not answered for `seconds`."""
    return f"the source's PD has not answered for {seconds:.0f} s"


class SafePointKeeper:
    """Holds a service safe point while a work runs: registers it at once, renews it every third of its TTL or more often.

    Work asks `check` at each step: once the safe point is lost, what it guards may be gone. As a context manager it
    registers on entry and, unless `stop_with_ttl` was called, releases on exit.
    """

    def __init__(
        self,
        pd: PdClient,
        service_id: str,
        safe_point: int,
        ttl_seconds: int,
        *,
        renew_every: float | None = None,
        probe_every: float | None = None,
        hint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`safe_point` is a timestamp; `ttl_seconds` is how long PD keeps it without a renewal.

        With `renew_every` it is renewed at least once in so many seconds, so that PD soon learns how it has advanced. With
        `probe_every` PD is asked for the GC safe point that often, so that `silent_seconds` soon shows that PD does not answer.
        `hint` is what to do if GC has passed it.
        """
        self.service_id = service_id
        self.safe_point = safe_point
        self.lost: SafePointError | None = None
        """Reason why the safe point no longer protects; None while it does."""
        self.passed = False
        """True once GC is known to have passed the safe point."""
        self._pd = pd
        self._ttl = ttl_seconds
        self._hint = hint
        self._every = min(ttl_seconds / RENEWALS_PER_TTL, renew_every or ttl_seconds)
        self._probes = max(1, round(self._every / probe_every)) if probe_every else 1  # the last of them renews
        self._clock = clock
        self._asked_at: float | None = None
        self._warn_at = 0.0  # no earlier
        self._held_until = 0.0
        self._renewal = BackgroundWork(f"safe-point-{service_id}", self._keep)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._renewal.is_stopped:
            self.stop()
            release(self._pd, self.service_id)

    def start(self) -> None:
        """Register, then renew in the background. Raises `SafePointError` when GC has passed it, `ClusterError`."""
        self._renew(self._ttl)
        self._renewal.start()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until PD drops the safe point without another renewal."""
        return max(self._held_until - self._clock(), 0.0)

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the keeper's unanswered request; 0 if PD has answered."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else self._clock() - asked_at

    def check(self) -> None:
        """Raise the `SafePointError` of a lost safe point; log a warning, once a minute, while PD does not answer."""
        if self.lost is not None:
            raise self.lost
        now, silent = self._clock(), self.silent_seconds
        if silent >= SILENCE_SECONDS and now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            left = self._held_until - now
            log.warning("%s: the safe point %s expires in %.0f s", describe_silence(silent), self.service_id, left)

    def confirm(self) -> None:
        """Ask PD now. Raises `SafePointError` if the safe point is lost, `ClusterError` if PD does not answer."""
        self.check()
        try:
            _check_passed(self._pd.gc_safe_point(), self.safe_point, self.service_id, self._hint)
        except SafePointError as error:
            self.lost, self.passed = error, True
            raise

    def advance(self, safe_point: int) -> None:
        """Guard only what is newer from now on; takes effect at PD with the next renewal. Never goes back."""
        self.safe_point = max(self.safe_point, safe_point)

    def stop_with_ttl(self, ttl_seconds: int) -> None:
        """Stop renewing and leave the safe point in place for so long. Raises `SafePointError` when it is lost."""
        self.stop()
        self.check()
        self._renew(ttl_seconds)

    def stop(self) -> None:
        """Stop renewing; PD forgets the safe point when its TTL ends."""
        self._renewal.stop()

    def _keep(self) -> None:
        asked = 0
        while self.lost is None:
            cancellation.sleep(self._every / self._probes)
            asked += 1
            try:
                if asked < self._probes:
                    self._probe()
                else:  # again at the next turn if it fails
                    self._renew(self._ttl)
                    asked = 0
            except SafePointError as error:
                self.lost, self.passed = error, True
            except TikvBrError as error:  # such as silence, or TLS files that are just being replaced
                if self._clock() > self._held_until:
                    self.lost = SafePointError(
                        f"cannot renew the safe point of {self.service_id} within its TTL of {self._ttl} s: {error}"
                    )

    def _probe(self) -> None:
        with self._waiting_for_pd():
            passed = self._pd.gc_safe_point()
        _check_passed(passed, self.safe_point, self.service_id, self._hint)

    def _renew(self, ttl_seconds: int) -> None:
        asked = self._clock()
        with self._waiting_for_pd():
            protect(self._pd, self.service_id, self.safe_point, ttl_seconds, self._hint)
        self._held_until = asked + ttl_seconds

    @contextmanager
    def _waiting_for_pd(self) -> Iterator[None]:
        """Note since when PD has not answered: a call may wait for it long before it fails."""
        if self._asked_at is None:
            self._asked_at = self._clock()
        yield
        self._asked_at = None


MIN_TTL = 60
"""Seconds that the safe point stands unrenewed while a backup runs, at least: a missed renewal must not lose it."""


def choose_backup_ts(cluster: Cluster, safe_interval: float) -> int:
    """Fetch a timestamp, flush every store, and step back ``safe_interval`` seconds.

    All writes acknowledged by now have a smaller ts than the one fetched; all later writes a larger one than the result.
    It is not before the end of an ingest whose rows keep older timestamps: what is read from now on has these rows.
    Raises `ClusterError`; `UsageError` for an interval that reaches before the epoch.
    """
    from tikv_br.cluster.ingest_announcer import kept_until  # late: only clusters of V2 have timestamps to choose

    now = cluster.pd.tso()
    cluster.flush_timestamps()
    backup_ts = minus_seconds(now, safe_interval)
    if not backup_ts:
        raise UsageError(f"--safe-interval of {safe_interval:g} s reaches back before the epoch")
    return max(backup_ts, min(kept_until(cluster), now))


def safe_point_keeper(cluster: Cluster, name: str, backup_ts: int, gc_ttl: int) -> SafePointKeeper:
    """A keeper, not yet started, of all that is newer than the versions that ``backup_ts`` sees."""
    ttl = max(gc_ttl, MIN_TTL)
    return SafePointKeeper(
        cluster.pd,
        name,
        backup_ts - 1,
        ttl,
        renew_every=RENEW_SECONDS,
        probe_every=PROBE_SECONDS,
        hint=OTHER_GC_HINT,
    )


BACKUP_SERVICES = "tikv-br-backup-"
"""Prefix of the names of the safe points of backups."""


def service_id(run_id: str, storage: StorageLocation) -> str:
    """The name under which PD holds the safe point of the run of a backup at a place.

    It has the place, so that an id in a record there can name no safe point of a backup elsewhere.
    """
    return f"{BACKUP_SERVICES}{run_id}-{hashlib.sha256(storage.redacted().encode()).hexdigest()[:8]}"
