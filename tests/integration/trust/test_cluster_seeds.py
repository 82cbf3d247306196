"""Every job while clusters split, merge, move, lose stores and PD's leader, and calls fail: docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trust.cluster_seeds import Clusters, clusters, run_seed


@pytest.fixture(scope="module")
def restless() -> Iterator[Clusters]:
    """The clusters of all seeds."""
    with clusters() as restless:
        yield restless


@pytest.mark.parametrize("seed", range(1, 9))
def test_nothing_differs_in_the_end(restless: Clusters, seed: int) -> None:
    """Each job succeeds, or gives up with a code that says to try again and then succeeds; then all clusters hold the same rows."""
    tally = run_seed(restless, seed)
    print(tally)  # noqa: T201 - shown where the test fails
    assert tally.operations > 0
