"""The id of a run, which is one invocation of the program: used in its logs, JSON lines, safe point and records."""

from __future__ import annotations

import os


class _Run:
    id = ""


def start() -> None:
    """Start a run in this process."""
    _Run.id = new()


def end() -> None:
    """End the run: later work in this process belongs to no run."""
    _Run.id = ""


def current() -> str:
    """The id of the current run; empty for a library call outside any run."""
    return _Run.id


def new() -> str:
    """A new unique id: 16 hex digits."""
    return os.urandom(8).hex()


def current_or_new() -> str:
    """The id of the current run, or a new one if there is none."""
    return current() or new()
