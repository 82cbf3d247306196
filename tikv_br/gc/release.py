"""Removes a service safe point that no living run renews any more."""

from __future__ import annotations

import time
from collections.abc import Callable

from tikv_br.cluster import safepoint
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, ServiceSafePoint
from tikv_br.errors import SafePointInUse, UsageError
from tikv_br.gc.status import owner_of

WATCH_SECONDS = safepoint.RENEW_SECONDS + 15.0
"""Seconds within which every live run of tikv-br renews its safe point."""
POLL_SECONDS = 1.0


def find(pd: PdClient, service: str) -> ServiceSafePoint:
    """The safe point of a service. Raises `UsageError` if there is none, or if it is GC's own."""
    if service == GC_WORKER:
        raise UsageError(
            f"{GC_WORKER} is the safe point of GC itself", hint="It never expires, and PD does not remove it."
        )
    found = _look(pd, service)
    if found is None:
        raise UsageError(f"PD has no service safe point {service}", hint="`tikv-br gc status` lists all of them.")
    return found


def release_unused(
    pd: PdClient,
    before: ServiceSafePoint,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Remove a safe point, found `before`, if nobody renews it for `seconds`. It may already be gone.

    Raises `SafePointInUse` if it is renewed, and leaves it as it is; `ClusterError`.
    """
    end = clock() + seconds
    while True:
        now = _look(pd, before.service)
        if now is None:
            return
        if now != before:
            owner = owner_of(before.service)
            what = f" ({owner})" if owner.is_ours else ""
            raise SafePointInUse(f"{before.service}{what} was just renewed: what it belongs to is running")
        left = end - clock()
        if left <= 0:
            break
        sleep(min(POLL_SECONDS, left))
    safepoint.release(pd, before.service)
    if _look(pd, before.service) is not None:
        raise SafePointInUse(f"{before.service} was removed, and at once registered again")


def _look(pd: PdClient, service: str) -> ServiceSafePoint | None:
    return next((each for each in pd.gc_status().services if each.service == service), None)
