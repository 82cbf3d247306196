"""What a probe is, and what it says."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tikv_br.check.surroundings import Surroundings


class Status(enum.StrEnum):
    """How it stands."""

    OK = "ok"
    WARN = "warn"
    """Works, but look at it."""
    FAIL = "fail"
    """Something asked for will not work."""
    SKIPPED = "skipped"
    """Could not be told, or was not asked for."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that monitoring may draw."""

    label: str
    value: float
    unit: str = ""
    """``s``, ``%``, ``B`` or nothing, as the plug-ins of Nagios have them."""
    warn: str = ""
    """Range of Nagios outside of which it is worth a warning: ``1`` (more than 1), ``20:`` (less than 20)."""
    critical: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe saw, and what to do about it."""

    status: Status
    seen: str
    advice: str = ""
    figures: tuple[Figure, ...] = ()


class NotAsked(Exception):
    """Raised in a probe whose subject is out of reach, or was not named: it is skipped. Another probe tells why."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to look at. ``look`` may raise `TikvBrError` (a failure) and `NotAsked` (skipped)."""

    name: str
    look: Callable[[Surroundings], Verdict]
    seconds: float = 0.0
    """What it may take at most; 0 = as all probes."""


@dataclass(frozen=True, slots=True)
class Result:
    """A probe's verdict, and how long it took."""

    name: str
    verdict: Verdict
    seconds: float


def ok(seen: str, *figures: Figure) -> Verdict:
    """All is well."""
    return Verdict(Status.OK, seen, figures=figures)


def warn(seen: str, advice: str, *figures: Figure) -> Verdict:
    """Works, but look at it."""
    return Verdict(Status.WARN, seen, advice, figures)


def fail(seen: str, advice: str, *figures: Figure) -> Verdict:
    """Will not work."""
    return Verdict(Status.FAIL, seen, advice, figures)


def skipped(seen: str) -> Verdict:
    """Could not be told."""
    return Verdict(Status.SKIPPED, seen)


def listed(items: list[str], most: int = 5) -> str:
    """Items in one line: the first few, and how many more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
