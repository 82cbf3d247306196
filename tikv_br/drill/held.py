"""Steps of a drill that ask for its lease first: another drill takes what this one has made for left behind, and removes it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tikv_br.backupset.lease import PathLease
from tikv_br.errors import LeaseLost, StorageError
from tikv_br.steps import Step

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Held(Generic[C]):
    """A step of whoever holds a lease."""

    step: Step[C]
    lease: PathLease

    @property
    def name(self) -> str:
        """As of the step."""
        return self.step.name

    def run(self, context: C) -> None:
        """Do it, unless the lease is lost. Raises `LeaseLost`."""
        self.lease.confirm()
        self.step.run(context)

    def undo(self, context: C) -> bool:
        """Take it back, unless that is another's work by now; a storage that does not answer leaves it at what was known."""
        with contextlib.suppress(LeaseLost, StorageError):
            self.lease.confirm()
        return self.lease.lost is None and self.step.undo(context)


def held(steps: Sequence[Step[C]], lease: PathLease) -> list[Step[C]]:
    """The steps, each of them only while the lease is held."""
    return [Held(step, lease) for step in steps]
