"""Verdict of a soak on its samples: growth is reported, noise is not."""

from __future__ import annotations

import random

from tests.trust.soak import MIB, Limits, Sample, Soaked


def soaked(growth: float, *, threads: int = 0) -> Soaked:
    """Samples of half an hour with a warm-up of 100 MiB, and then so many MiB more, with noise of 3 MiB."""
    chance = random.Random(1)

    def sample(at: float) -> Sample:
        share = max(0.0, at - 300) / 1500
        rss = 200 + min(at, 300) / 3 + growth * share + chance.uniform(-3, 3)
        return Sample(at, int(rss * MIB), 20, 25 + int(threads * share), MIB, 0, 6.5, int(at * 500))

    return Soaked.of([sample(float(at)) for at in range(0, 1801, 5)], 300.0, 180)


def test_temporary_growth_is_no_fault() -> None:
    """The warm-up does not count, nor does noise; rows are those after the warm-up."""
    flat = soaked(0.0)
    assert flat.faults(Limits()) == []
    assert abs(flat.rss_mib.growth) < 1
    assert flat.rows == 1500 * 500


def test_growth_is_reported() -> None:
    """Memory and threads beyond their limits are named, with the amount."""
    assert soaked(40.0).faults(Limits())[0].startswith("rss_mib rises by 4")
    assert soaked(0.0, threads=9).faults(Limits())[0].startswith("threads rises by")
