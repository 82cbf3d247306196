"""Removes what drills have made, by the ledger alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from tikv_br.drill.ledger import Creation, Kind, Ledger, left_behind
from tikv_br.errors import DrillRemains, TikvBrError
from tikv_br.storage.base import ObjectStore

COPIES = "copies"
"""Folder of the drills' home for copies of backups."""
log = logging.getLogger(__name__)


class Remover(Protocol):
    """Removes one kind of thing."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Remove it, however far it was made. Idempotent. Raises `DrillRemains` for what is not the drill's own."""


def forget_backup(ledger: Ledger) -> None:
    """Take a drill's finished backup from its page: its report names it now."""
    for creation in ledger.creations:
        if creation.kind is Kind.MADE_BACKUP:
            ledger.forget(creation)


class Cleaner:
    """Removes whatever stands in the ledger and nothing else."""

    def __init__(self, home: ObjectStore, removers: Mapping[Kind, Remover]) -> None:
        self._home = home
        self._removers = removers

    def clean(self, ledger: Ledger) -> None:
        """Remove all that a drill has made, the newest first.

        What cannot be removed stays in the ledger, and keeps nothing else from being removed but the journal by which
        its rows are told. Raises the first `TikvBrError` when the rest is done.
        """
        problems: list[TikvBrError] = []
        newest_first = ledger.creations[::-1]
        for creation in sorted(newest_first, key=lambda each: each.kind is Kind.COPY):
            rows_stay = any(each.kind is Kind.KEYS for each in ledger.creations)
            if creation.kind is Kind.MADE_BACKUP or (creation.kind is Kind.COPY and rows_stay):
                continue
            try:
                self._remove(creation, ledger.drill)
                ledger.forget(creation)
            except TikvBrError as error:
                log.warning("the %s of drill %s stays: %s", creation.kind.value, ledger.drill, error.message)
                problems.append(error)
        if problems:
            raise problems[0]

    def clean_earlier(self) -> list[str]:
        """Remove what drills that were broken off have left, and return what could not be removed, and why."""
        problems = []
        for ledger in left_behind(self._home):
            try:
                self.clean(ledger)
                forget_backup(ledger)
            except TikvBrError as error:
                log.warning("drill %s left something that stays: %s", ledger.drill, error.message)
                problems.append(f"drill {ledger.drill} left something that stays: {error.message}")
        return problems

    def _remove(self, creation: Creation, drill: str) -> None:
        if creation.kind is Kind.COPY:
            self._remove_copy(creation, drill)
        elif creation.kind in self._removers:
            self._removers[creation.kind].remove(creation, drill)
        else:
            raise DrillRemains(f"a {creation.kind.value} at {creation.place} cannot be removed from here")

    def _remove_copy(self, creation: Creation, drill: str) -> None:
        if creation.place != f"{COPIES}/{drill}":
            raise DrillRemains(f"{creation.place} is no place for a copy of drill {drill}: it is left alone")
        for info in list(self._home.list(creation.place)):
            self._home.delete(info.name)
        self._home.sweep(COPIES, deep=True)
