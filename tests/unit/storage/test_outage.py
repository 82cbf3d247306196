"""Waiting for a storage location that does not answer, with a clock of the test's own."""

from __future__ import annotations

import pytest

from tikv_br.errors import StorageUnreachable, TikvBrError
from tikv_br.storage.outage import LocationHealth, StorageAway

PATIENCE = 10.0


@pytest.mark.parametrize("away", [0.0, 5.0, PATIENCE - 0.01, PATIENCE + 0.01])
@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_all_of_the_patience_is_used(away: float, chance: float) -> None:
    """A location that comes back within the patience is waited for, whatever the pauses between two tries."""
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def ask() -> TikvBrError | None:
        return None if now >= 1000.0 + away else StorageUnreachable("connection refused")

    health = LocationHealth(clock=lambda: now, sleep=sleep, chance=lambda: chance)
    health.succeeded()
    health.failed(now)
    if away > PATIENCE:
        with pytest.raises(StorageAway, match="connection refused; gave up after 10 s"):
            health.wait(ask, PATIENCE)
        assert now == pytest.approx(1000.0 + PATIENCE)
    else:
        health.wait(ask, PATIENCE)
        assert health.is_answering
