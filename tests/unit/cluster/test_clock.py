"""This machine's clock against PD's timestamps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tikv_br.cluster import clock
from tikv_br.cluster.clock import ClusterClock, measure_clock
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamps import compose


class Timestamps(PdClient):
    """PD's, from a clock ``ahead`` of ours; none below ``floor`` (milliseconds), as after changes of its leader."""

    def __init__(self, ahead: float, floor: float = 0) -> None:
        self._ahead, self._floor = ahead, floor
        self.asked = 0

    def tso(self) -> int:
        """A timestamp."""
        self.asked += 1
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


@pytest.mark.parametrize("ahead", [0.0, 7200.0, -7200.0])
def test_time_of_pd_is_measured_once(ahead: float) -> None:
    """Further looks at the clock ask nothing."""
    pd = Timestamps(ahead)
    found = ClusterClock(pd)
    assert found.now() == pytest.approx(time.time() + ahead, abs=3)
    asked = pd.asked
    assert found.now() == pytest.approx(time.time() + ahead, abs=3)
    assert pd.asked == asked


def test_time_of_pd_is_measured_again_once_this_machines_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody corrects it while a sync runs."""
    wrong, right = 7200.0, time.time
    pd = Timestamps(0)
    pd.tso = lambda: compose(round(right() * 1000))  # type: ignore[method-assign]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: right() + wrong, monotonic=time.monotonic))
    found = ClusterClock(pd)
    assert found.now() == pytest.approx(right(), abs=3)
    wrong = 0.0
    assert found.now() == pytest.approx(right(), abs=3)


def test_time_of_pd_is_this_machines_while_timestamps_stand_still() -> None:
    """After changes of PD's leader they are ahead of PD's own clock; not if they are further away than these explain."""
    assert ClusterClock(Timestamps(0, (time.time() + 20) * 1000)).now() == pytest.approx(time.time(), abs=3)
    hours = ClusterClock(Timestamps(0, (time.time() + 7200) * 1000))
    assert hours.now() == pytest.approx(time.time() + 7200, abs=3)


@pytest.mark.parametrize(
    ("ahead", "remark"),
    [
        (0.0, ""),
        (-4.0, ""),
        (-20.0, "This machine's clock is 20 s ahead of PD's. Expiry is judged by PD's."),
        (7200.0, "This machine's clock is 2 h 0 min behind PD's. Expiry is judged by PD's."),
    ],
)
def test_clocks_that_differ_are_named(ahead: float, remark: str) -> None:
    """Once comparisons do not allow for the difference."""
    assert ClusterClock(Timestamps(ahead)).remark() == remark
