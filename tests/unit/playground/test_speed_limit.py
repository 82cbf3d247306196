"""Download speed of a store."""

from __future__ import annotations

from tikv_br.playground.import_service import DownloadLimit


def test_the_last_limit_counts_for_good() -> None:
    """As on TiKV 9.0: it has no owner and no end."""
    now = 0.0
    limit = DownloadLimit(lambda: now)
    assert limit.current == 0
    limit.set(500)
    limit.set(900)
    now = 1e9
    assert limit.current == 900
    limit.set(0)
    assert limit.current == 0


def test_downloads_share_the_limit_of_their_store() -> None:
    """Two that begin together last as long as both one after the other; without a limit none lasts."""
    now = 0.0
    limit = DownloadLimit(lambda: now)
    assert limit.delay(1000) == 0
    limit.set(500)
    assert [limit.delay(1000), limit.delay(500)] == [2.0, 3.0]
    now = 10.0
    assert limit.delay(500) == 1.0
