"""Import mode and pauses: set, renewed, and put back at PD and at every store."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.import_mode import ImportMode, active_balance_schedulers
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted
from tikv_br.retry import RetryPolicy

IMPORT, NORMAL = 1, 0


class Servers:
    """PD and two stores that record requests."""

    def __init__(self, failing: int = 0) -> None:
        self.calls: list[tuple[object, int]] = []
        self.failing = failing
        self.often = threading.Event()
        """Set after several requests."""
        self.pd_http = SimpleNamespace(pause_scheduler=lambda name, seconds: self.calls.append((name, seconds)))
        self.config = SimpleNamespace(retry=RetryPolicy(0.0))

    def stores(self, *, known: bool = False) -> list[Any]:
        """The stores that hold data."""
        return [SimpleNamespace(id=each) for each in (1, 2)]

    def store(self, store_id: int) -> Any:  # noqa: ANN401
        """The client of a store."""

        def switch(mode: int) -> None:
            if store_id == self.failing:
                raise ClusterUnreachable("gone")
            self.calls.append((store_id, mode))
            if len(self.calls) > 5:
                self.often.set()

        return SimpleNamespace(switch_mode=switch)


def mode_of(servers: Servers, pause: float = 300) -> ImportMode:
    """Import mode with one scheduler to pause."""
    return ImportMode(cast("Cluster", servers), ["balance-leader-scheduler"], cast("int", pause))


def test_everything_is_switched_and_put_back() -> None:
    """Schedulers for a time only, stores that hold data; then the same the other way."""
    servers = Servers()
    mode = mode_of(servers)
    mode.enter()
    assert servers.calls == [("balance-leader-scheduler", 300), (1, IMPORT), (2, IMPORT)]
    mode.leave()
    assert servers.calls[3:] == [("balance-leader-scheduler", 0), (1, NORMAL), (2, NORMAL)]


def test_it_is_renewed_while_it_is_held() -> None:
    """Before the pauses end by themselves they are set again; after `leave` never."""
    servers = Servers()
    mode = mode_of(servers, 0.03)
    mode.enter()
    assert servers.often.wait(30)
    mode.leave()
    assert servers.calls[-2:] == [(1, NORMAL), (2, NORMAL)]
    assert not any(thread.name == "import-mode" for thread in threading.enumerate())


def test_a_store_that_is_away_hinders_entering_and_not_leaving() -> None:
    """Entering needs every store; leaving continues with the others, and reports the missing one."""
    servers = Servers(failing=1)
    mode = mode_of(servers)
    with pytest.raises(RetryBudgetExhausted):
        mode.enter()
    with pytest.raises(ClusterUnreachable, match=r"import mode or .* remain, .* within ten minutes: gone"):
        mode.leave()
    assert servers.calls[-1] == (2, NORMAL)


def test_only_what_moves_regions_and_runs_is_paused() -> None:
    """A scheduler that the operator has paused is not ours to let go on."""
    names = ["balance-leader-scheduler", "balance-region-scheduler", "evict-slow-store-scheduler"]
    paused = ["balance-region-scheduler"]
    pd_http = SimpleNamespace(schedulers=lambda *, paused=False, lists=(names, paused): lists[paused])
    assert active_balance_schedulers(cast("Cluster", SimpleNamespace(pd_http=pd_http))) == ["balance-leader-scheduler"]
