"""Backups, restores and verifications over a storage that fails, loses answers and alters bytes: docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trust.storage_seeds import Pair, clusters, run_seed


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A source and a target for all seeds."""
    with clusters() as pair:
        yield pair


@pytest.mark.parametrize("seed", range(1, 31))
def test_nothing_differs_in_the_end(pair: Pair, seed: int) -> None:
    """Each command succeeds, or says why not with a code of its own and succeeds when it is run again; then all rows are there."""
    tally = run_seed(pair, seed)
    print(tally)  # noqa: T201 - shown where the test fails
    assert tally.operations > 50
