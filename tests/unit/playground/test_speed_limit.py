from __future__ import annotations

from tikv_br.playground.speed_limit import SpeedLimit


def test_the_smallest_limit_counts_while_it_holds() -> None:
    """Several tasks share the strictest limit; it ends with its ttl, with 0, or never."""
    now = 0.0
    limit = SpeedLimit(lambda: now)
    assert limit.current() == 0
    limit.set("", 900, 0)
    limit.set("a", 500, 10)
    assert limit.current() == 500
    now = 10.0
    assert limit.current() == 900
    limit.set("b", 100, 60)
    limit.set("b", 0, 0)
    assert limit.current() == 900
    limit.set("", 0, 0)
    assert limit.current() == 0


def test_downloads_share_the_limit_of_their_store() -> None:
    """Two that begin together last as long as both one after the other; without a limit none lasts."""
    now = 0.0
    limit = SpeedLimit(lambda: now)
    assert limit.delay(1000) == 0
    limit.set("", 500, 0)
    assert [limit.delay(1000), limit.delay(500)] == [2.0, 3.0]
    now = 10.0
    assert limit.delay(500) == 1.0
