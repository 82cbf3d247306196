"""The checker of histories finds what it is there to find."""

from __future__ import annotations

import threading

import pytest

from tests.support.history import CheckpointWatch, Passed, Version, assert_same_end, check

SOURCE = {b"k": [Version(10, b"1"), Version(20, None), Version(30, b"2"), Version(40, None)]}
PASSED = [Passed(1000, 9), Passed(2000, 25), Passed(3000, 35)]


def at_target(*versions: tuple[int, bytes | None]) -> dict[bytes, list[Version]]:
    """One key's versions at the target."""
    return {b"k": [Version(*version) for version in versions]}


def test_repeats_and_returns_to_the_checkpoint_are_valid() -> None:
    """Repeated versions, returns to a version that no checkpoint has passed, and omitted versions are valid."""
    assert check(SOURCE, at_target((900, b"1"), (1500, None), (1600, b"1")), PASSED) == 0
    assert check(SOURCE, at_target((900, b"1"), (2500, None), (2600, b"2"), (3500, b"2")), PASSED) == 3


def test_expiring_rows_may_disappear() -> None:
    """The end of a row needs no delete of the source; that of a permanent one does."""
    expiring = {b"k": [Version(10, b"1", expires=True), Version(30, b"2")]}
    assert check(expiring, at_target((900, None)), PASSED) == 0
    for source, ts in (({b"k": [Version(10, b"1")]}, 900), (expiring, 3500)):
        with pytest.raises(AssertionError, match=r"went back|was never"):
            check(source, at_target((ts, None)), PASSED)


@pytest.mark.parametrize("version", [(2001, b"1"), (3500, b"1"), (900, b"x")])
def test_regressions_and_unknown_values_are_invalid(version: tuple[int, bytes | None]) -> None:
    """A value that a checkpoint has passed, and one that was never written."""
    with pytest.raises(AssertionError, match=r"went back|was never"):
        check(SOURCE, at_target(version), PASSED)


def test_ends_are_compared_by_live_rows() -> None:
    """A deleted key equals a missing one; any other difference is reported."""
    assert_same_end(SOURCE, {})
    with pytest.raises(AssertionError):
        assert_same_end(SOURCE, at_target((900, b"1")))


def test_a_checkpoint_that_goes_back_is_told() -> None:
    """The watch fails at the end of its block, and has noted each step before."""
    saved, looks = [0, 5, 5, 7, 6], iter(range(5))
    done = threading.Event()

    def checkpoint() -> int:
        look = next(looks)
        if look == len(saved) - 1:
            done.set()
        return saved[look]

    watch = CheckpointWatch(checkpoint, lambda: 99, every=0.001)
    with pytest.raises(AssertionError, match="went back from 7 to 6"), watch:
        assert done.wait(30)
    assert watch.passed == [Passed(99, 5), Passed(99, 7)]
