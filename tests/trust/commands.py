"""Commands run within this process, until they succeed, and what they say when they do not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.e2e.command import environment
from tikv_br.cli.main import run

TRIES = 20
PAUSE = 0.1
"""Seconds between two of them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended command."""

    code: int
    lines: list[dict[str, Any]]
    """Lines of its standard output."""
    err: str

    @property
    def error(self) -> str:
        """Error of the command: class and message."""
        last = self.lines[-1] if self.lines else {}
        return f"{last.get('name', '')}: {last.get('message', self.err[-2000:])}"


@dataclass(slots=True)
class Tally:
    """Outcomes of the commands of one seed."""

    commands: Counter[str] = field(default_factory=Counter)
    """That were to be done, by name."""
    reruns: Counter[str] = field(default_factory=Counter)
    """By name and exit code: each was followed by the same command again."""
    operations: int = 0
    """That could have met a fault."""
    faults: Counter[str] = field(default_factory=Counter)
    """By kind."""

    def insist(self, name: str, *arguments: str, allowed: frozenset[int]) -> Ended:
        """Run a command until it succeeds; fails when it ends with a code that is not among the allowed ones."""
        self.commands[name] += 1
        for _ in range(TRIES):
            ended = command(*arguments)
            if not ended.code:
                return ended
            assert ended.code in allowed, f"{name} ended with {ended.code}: {ended.error}"
            self.reruns[f"{name} {ended.code}"] += 1
            time.sleep(PAUSE)
        raise AssertionError(f"{name} did not succeed within {TRIES} tries: {ended.error}")


def command(*arguments: str) -> Ended:
    """Run one command to its end."""
    out, err = io.StringIO(), io.StringIO()
    with _bare_environment(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*arguments, "--output", "json"])
    return Ended(code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue())


@contextlib.contextmanager
def _bare_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ, environment(), clear=True):
        yield
