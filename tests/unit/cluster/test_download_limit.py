"""A limit on downloads: set, renewed and lifted at every store, by name."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.import_mode import DownloadLimit
from tikv_br.errors import ClusterUnreachable
from tikv_br.retry import RetryPolicy


class Stores:
    """A cluster of two stores that records requests."""

    def __init__(self, failing: int = 0) -> None:
        self.calls: list[tuple[int, int, str, int]] = []
        self.failing = failing
        self.often = threading.Event()
        """Set after several requests."""
        self.config = SimpleNamespace(retry=RetryPolicy(0.0))

    def stores(self, *, known: bool = False) -> list[Any]:
        """The stores that hold data."""
        return [SimpleNamespace(id=number) for number in (1, 2)]

    def store(self, store_id: int) -> Any:  # noqa: ANN401
        """The client of a store."""

        def tell(rate: int, *, task_id: str, ttl_seconds: int) -> None:
            if store_id == self.failing:
                raise ClusterUnreachable("gone")
            self.calls.append((store_id, rate, task_id, ttl_seconds))
            if len(self.calls) > 5:
                self.often.set()

        return SimpleNamespace(set_download_speed_limit=tell)


def limit(stores: Stores, rate: int = 500) -> DownloadLimit:
    """A limit of 500 bytes a second."""
    return DownloadLimit(cast("Cluster", stores), rate, "me")


def test_no_limit_lifts_what_another_has_left() -> None:
    """At the start only: at the end another work may have set one."""
    stores = Stores()
    none = limit(stores, 0)
    none.start()
    assert stores.calls == [(1, 0, "me", 0), (2, 0, "me", 0)]
    none.stop()
    assert len(stores.calls) == 2


def test_no_limit_needs_no_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the work goes on."""
    stores = Stores(failing=1)
    limit(stores, 0).start()
    assert stores.calls == [(2, 0, "me", 0)]
    assert "download limit" in caplog.text


def test_set_by_name_with_an_end_and_lifted() -> None:
    """Every store that holds data gets the limit; that of a killed holder expires; 0 lifts it, repeatedly."""
    stores = Stores()
    held = limit(stores)
    held.start()
    assert stores.calls == [(1, 500, "me", 60), (2, 500, "me", 60)]
    held.stop()
    held.stop()
    assert stores.calls[2:] == [(1, 0, "me", 0), (2, 0, "me", 0)] * 2


def test_renewed_while_it_is_held() -> None:
    """Long before its end it is set again."""
    stores = Stores()
    held = DownloadLimit(cast("Cluster", stores), 500, "me", 0.01)
    held.start()
    assert stores.often.wait(60)
    held.stop()
    assert stores.calls[-1][1] == 0


def test_a_store_that_is_away() -> None:
    """At the start it is an error, once the retries are spent."""
    with pytest.raises(ClusterUnreachable):
        limit(Stores(failing=1))._set(500)


def test_the_others_are_freed_when_one_is_away() -> None:
    """An unreachable store keeps no other limited, and the error names what is left."""
    stores = Stores()
    held = limit(stores)
    held.start()
    stores.failing = 1
    with pytest.raises(ClusterUnreachable, match=r"a store may keep its download limit .* gone"):
        held.stop()
    assert stores.calls[-1] == (2, 0, "me", 0)
