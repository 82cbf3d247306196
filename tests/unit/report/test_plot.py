from __future__ import annotations

import random

import pytest

from tests.unit.drill.samples import passed
from tikv_br.report.facts import Cell
from tikv_br.report.plot import WIDTH, curve, nice_top, strip, throughput, timeline, visible_phases
from tikv_br.report.recorder import Phase, Sample


def test_the_top_of_a_plot_is_round_and_not_below_its_values() -> None:
    """1, 2 and 5 times powers of ten; a plot of nothing has a top as well."""
    assert [nice_top(value) for value in (0, 0.3, 1, 1.1, 4, 5.1, 10, 99, 1e6)] == [1, 0.5, 1, 2, 5, 10, 10, 100, 1e6]


def test_a_curve_fills_the_plot_and_its_limit_lies_within() -> None:
    """The largest value may be below the limit: both are seen."""
    made = curve([0, 1], [1, 2], limit=4)
    assert made.points[0][0] < made.points[1][0] <= WIDTH
    assert made.limit is not None
    assert made.limit < made.points[1][1] < made.points[0][1]
    assert len(curve([7], [1]).points) == 1


def test_a_limit_far_above_all_values_leaves_them_their_height() -> None:
    """With a limit of two hours and values in seconds, the trend is visible, and the limit is only text."""
    made = curve([0, 1], [2.0, 3.0], limit=7200.0, unit="s")
    assert made.limit is None
    assert made.points == curve([0, 1], [2.0, 3.0], unit="s").points
    assert curve([0, 1], [None, None], limit=7200.0).limit is not None


def test_throughput_is_told_within_an_operation_only() -> None:
    """Bytes are spread over their time; between the last sample of one operation and the first of the next there are none."""
    samples = [
        Sample(0, "a", 0, 0),
        Sample(1, "a", 0, 0),  # no event of the task in between
        Sample(2, "a", 1, 100),
        Sample(3, "b", 0, 0),
        Sample(4, "b", 1, 30),
        Sample(5, "b", 0, 0),
    ]
    assert throughput(samples, 5) == [(0.5, 50), (1.5, 50), (2.5, 0), (3.5, 30), (4.5, 0)]
    assert throughput(samples[:1]) == []


def test_no_byte_of_throughput_is_lost_or_counted_twice() -> None:
    """Jumps at odd moments, also some within one part: the plot's sum is what came."""
    chance = random.Random(1)
    samples, seconds, size = [Sample(0, "a", 0, 0)], 0.0, 0
    for _ in range(300):
        seconds, size = seconds + chance.random() ** 4, size + chance.randrange(1000)
        samples.append(Sample(seconds, "a", 0, size))
    width = seconds / 80
    assert sum(rate * width for _, rate in throughput(samples, 80)) == pytest.approx(size)


def test_the_timeline_keeps_steps_and_what_failed_or_took_time() -> None:
    """Quick parts of steps of a long drill are omitted, but never a step or a failure."""
    step, quick, slow = Phase("step", "", 0, 0), Phase("quick", "step", 0, 0.1), Phase("slow", "step", 0, 50)
    failed = Phase("failed", "step", 50, 0, ended_well=False)
    assert visible_phases([step, quick, slow, failed], 100) == [step, slow, failed]


def test_bars_lie_where_their_phases_were_and_the_quickest_is_seen() -> None:
    """A phase of no time has some width."""
    bars = timeline([Phase("a", "", 0, 50), Phase("b", "", 50, 0)], 100)
    assert (bars[0].x, bars[0].width, bars[1].x) == (0, WIDTH / 2, WIDTH / 2)
    assert bars[1].width > 0


def test_the_map_is_as_wide_as_the_bytes_and_as_dark_as_the_keys() -> None:
    """All parts together fill the width; the densest is fully dark, an empty one does no harm."""
    bars = strip([Cell("", "61", 10, 100, 1), Cell("61", "62", 10, 300, 1), Cell("62", "", 0, 0, 1)])
    assert [bar.width for bar in bars] == [WIDTH / 4, WIDTH * 3 / 4, 0]
    assert bars[0].shade == 1 > bars[1].shade > bars[2].shade
    assert sum(bar.width for bar in strip(passed().keyspace_map)) == WIDTH
