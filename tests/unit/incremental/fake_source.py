"""A source cluster as a feed sees it: writes with rising timestamps, and a feed as bad as a real one may be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.unit.incremental.changes import Change, batch
from tikv_br.incremental.feed.events import Resolved, Rows


@dataclass
class FakeSource:
    """Few keys, so that each has a long history."""

    seed: int
    keys: int = 40
    history: list[Change] = field(default_factory=list)
    """By ascending ts."""
    ts: int = 1000

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def write(self, count: int) -> list[Change]:
        """Write to random keys; some writes of one request share a ts."""
        made: list[Change] = []
        for _ in range(count):
            self.ts += self.random.choice([0, 1, 1, 7]) if made else 1
            key = b"k%02d" % self.random.randrange(self.keys)
            if any(row.ts == self.ts and row.key == key for row in made):
                self.ts += 1
            made.append(Change(self.ts, key, b"%d" % self.ts, deleted=self.random.random() < 0.2))
        self.history += made
        return made

    def state(self) -> dict[bytes, bytes]:
        """The live rows."""
        last = {row.key: row for row in self.history}
        return {key: row.value for key, row in last.items() if not row.deleted}

    def feed(self, start_ts: int, rounds: int) -> Iterator[Rows | Resolved]:
        """Scan what is newer than a ts (the newest of each key, and in no order), then follow: out of order, some twice.

        Resolved timestamps lag behind, and are sent late.
        """
        newest = {row.key: row for row in self.history if row.ts > start_ts}
        open_rows = list(newest.values())
        resolved = start_ts
        for _ in range(rounds):
            open_rows += self.write(self.random.randrange(1, 60))
            reported = [row for row in open_rows if self.random.random() < 0.7]
            reported += self.random.sample(reported, len(reported) // 5)
            self.random.shuffle(reported)
            yield from self._rows(reported)
            missing = [row.ts for row in open_rows if row not in reported]
            resolved = max(resolved, min([*missing, self.ts + 1]) - 1 - self.random.randrange(3))
            open_rows = [row for row in open_rows if row.ts > resolved]
            yield Resolved(resolved)
        self.ts += 1
        yield from self._rows(open_rows)
        yield Resolved(self.ts)

    def _rows(self, rows: list[Change]) -> Iterator[Rows | Resolved]:
        at = 0
        while at < len(rows):
            size = self.random.randrange(1, 20)
            yield Rows(batch(rows[at : at + size]))
            at += size
