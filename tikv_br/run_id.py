"""The id of a run: one invocation of the program, as its logs, JSON lines, safe point and records name it."""

from __future__ import annotations

import secrets


class _Run:
    id = ""


def start() -> None:
    """Begin a run of the program in this process."""
    _Run.id = new()


def end() -> None:
    """End it: what follows in this process belongs to no run."""
    _Run.id = ""


def current() -> str:
    """The id of the run that the program has begun; empty where a library call has none around it."""
    return _Run.id


def new() -> str:
    """An id that no other run has: 16 hex digits."""
    return secrets.token_hex(8)


def current_or_new() -> str:
    """The id for work that is recorded under one, whoever called it."""
    return current() or new()
