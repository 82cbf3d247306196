"""Damage to stored objects: kinds of objects, kinds of damage, and their combinations.

Cases are made from the objects that are really there: a new kind of object has no pattern here, and `kind_of` fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

Objects: TypeAlias = Mapping[str, bytes]
Change: TypeAlias = dict[str, bytes | None]
"""New content by name; None = the object is gone."""
FLIPS = 50

KINDS = {
    "backupmeta": r"backupmeta",
    "lock": r"backup\.lock",
    "manifest": r"tikv-br/manifest\.json",
    "run": r"tikv-br/run\.json",
    "ledger": r"tikv-br/ledger/[0-9a-f]{16}-[0-9a-f]{16}\.json",
    "lease": r"tikv-br/lease/[0-9]{8}\.json",
    "sst": r"sst/.+_default\.sst",
    "parquet": r"parquet/.+\.parquet",
    "restore begun": r"tikv-br/restore/[0-9a-f]{16}/begun\.json",
    "restore part": r"tikv-br/restore/[0-9a-f]{16}/[0-9a-f]{16}\.json",
    "import mode": r"tikv-br/restore/import-mode-[0-9]+/[0-9a-f]{16}\.json",
    "index entry": r"tikv-br-index/entries/[0-9a-f]{16}\.json",
    "index pin": r"tikv-br-index/pins/[0-9a-f]{16}",
    "index removal": r"tikv-br-index/removals/[0-9a-f]{16}\.json",
    "index snapshot": r"tikv-br-index/snapshot\.json",
    "log description": r"[^/]+/log\.json",
    "log segment": r"[^/]+/segments/[^/]+\.json",
    "log data": r"[^/]+/data/.+\.parquet",
    "log truncation": r"[^/]+/truncated\.json",
    "drill ledger": r"ledger/[^/]+\.json",
    "drill report": r"reports/[^/]+\.json",
    "drill page": r"reports/[^/]+\.html|index\.html",
    "sync epoch": r"[^/]+/epoch-[0-9]{10}",
    "sync checkpoint": r"[^/]+/checkpoint-[0-9]{10}\.json",
    "etcd changefeed": r"/tikv-br/[0-9]+/changefeed/[^/]+",
    "etcd task": r"/tikv-br/[0-9]+/task/[^/]+/[0-9]{4}",
    "etcd progress": r"/tikv-br/[0-9]+/progress/[^/]+/[0-9]{4}",
    "etcd status": r"/tikv-br/[0-9]+/status/[^/]+",
    "etcd capture": r"/tikv-br/[0-9]+/capture/[^/]+",
}


def kind_of(name: str) -> str:
    """The kind of an object. Fails for an object that this matrix does not know: say here what it is."""
    found = [kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, f"{name} is of no known kind of object: add it to KINDS, and to what the tests expect"
    return found[0]


def by_kind(names: Iterator[str] | Mapping[str, bytes]) -> dict[str, list[str]]:
    """The names of each kind, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(kind_of(name), []).append(name)
    return found


class Case(NamedTuple):
    """One damage to one object."""

    kind: str
    damage: str
    name: str
    """Name of the damaged object; of two that were swapped, the first."""
    change: Change

    def __str__(self) -> str:
        return f"{self.damage} {self.name}"


def cases(objects: Objects, older: Objects, flips: Callable[[str], int], seed: int = 0) -> Iterator[Case]:
    """Every kind of damage to one object of each kind; ``flips`` says how many flipped bits go over all objects of a kind.

    ``older`` are the objects of an earlier backup of the same source.
    """
    before = by_kind(older)
    for kind, names in by_kind(objects).items():
        chance = random.Random(f"{seed} {kind}")
        victim = chance.choice(names)
        data = objects[victim]
        yield Case(kind, "missing", victim, {victim: None})
        if data:
            yield Case(kind, "empty", victim, {victim: b""})
            yield Case(kind, "truncated", victim, {victim: data[: chance.randrange(1, len(data))]})
            yield Case(kind, "short of a byte", victim, {victim: data[:-1]})
        yield from _swapped(objects, names, kind)
        if kind in before and older[before[kind][0]] != objects[names[0]]:
            yield Case(kind, "older", names[0], {names[0]: older[before[kind][0]]})
        for _ in range(flips(kind) if data else 0):
            victim = chance.choice(names)
            yield Case(kind, "flipped", victim, {victim: flipped(objects[victim], chance)})


def flipped(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one bit turned over."""
    place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def _swapped(objects: Objects, names: list[str], kind: str) -> Iterator[Case]:
    """The first of a kind changes places with its neighbour, of its own kind where there are several."""
    ordered = names if len(names) > 1 else sorted(objects)
    one, other = names[0], ordered[(ordered.index(names[0]) + 1) % len(ordered)]
    if objects[one] != objects[other]:
        yield Case(kind, "swapped", one, {one: objects[other], other: objects[one]})


def read_objects(folder: Path) -> dict[str, bytes]:
    """All objects below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Victim:
    """A folder of objects that is damaged for the length of a block."""

    def __init__(self, folder: Path, objects: Objects) -> None:
        self.folder, self.objects = folder, objects
        self._write(dict(objects))

    def damage(self, case: Case) -> None:
        """Do it."""
        self._write(case.change)

    def mend(self, case: Case) -> None:
        """Undo it."""
        self._write({name: self.objects[name] for name in case.change})

    def _write(self, change: Change) -> None:
        for name, data in change.items():
            path = self.folder / name
            if data is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
