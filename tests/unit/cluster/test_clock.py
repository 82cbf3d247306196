"""This machine's clock against PD's timestamps."""

from __future__ import annotations

import time

import pytest

from tikv_br.cluster.clock import measure_clock
from tikv_br.cluster.timestamps import compose


class Timestamps:
    """PD's, from a clock ``ahead`` of ours; none below ``floor`` (milliseconds), as after changes of its leader."""

    def __init__(self, ahead: float, floor: float = 0) -> None:
        self._ahead, self._floor = ahead, floor

    def tso(self) -> int:
        """A timestamp."""
        return compose(round(max((time.time() + self._ahead) * 1000, self._floor)))


@pytest.mark.parametrize("ahead", [0.0, 7200.0, -7200.0])
def test_difference_of_clocks(ahead: float) -> None:
    """Two hours in either direction; the timestamps advance with time."""
    found = measure_clock(Timestamps(ahead))
    assert found.ahead == pytest.approx(-ahead, abs=0.5)
    assert not found.stalled


def test_timestamps_that_leader_changes_moved_ahead() -> None:
    """They stand still, so they are not the time by PD's clock."""
    found = measure_clock(Timestamps(0, (time.time() + 20) * 1000))
    assert found.stalled
    assert found.ahead == pytest.approx(-20, abs=1)
