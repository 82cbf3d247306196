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


def test_what_may_be() -> None:
    """What comes twice, goes back to what no checkpoint has passed, or leaves versions out, is in order."""
    assert check(SOURCE, at_target((900, b"1"), (1500, None), (1600, b"1")), PASSED) == 0
    assert check(SOURCE, at_target((900, b"1"), (2500, None), (2600, b"2"), (3500, b"2")), PASSED) == 3


def test_what_expires_may_be_gone() -> None:
    """The end of a row is no delete that the source would have to know of; that of one which stays is."""
    expiring = {b"k": [Version(10, b"1", expires=True), Version(30, b"2")]}
    assert check(expiring, at_target((900, None)), PASSED) == 0
    for source, ts in (({b"k": [Version(10, b"1")]}, 900), (expiring, 3500)):
        with pytest.raises(AssertionError, match=r"went back|was never"):
            check(source, at_target((ts, None)), PASSED)


@pytest.mark.parametrize("version", [(2001, b"1"), (3500, b"1"), (900, b"x")])
def test_what_must_not_be(version: tuple[int, bytes | None]) -> None:
    """A value that a checkpoint had left behind, and one that never was."""
    with pytest.raises(AssertionError, match=r"went back|was never"):
        check(SOURCE, at_target(version), PASSED)


def test_ends_are_compared_by_live_rows() -> None:
    """A deleted key is the same as none; any other difference is told."""
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
