"""PD's list of keyspaces: DEFAULT from the start, others by PD's HTTP API."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Final

from tikv_br.errors import PlaygroundError
from tikv_br.playground.engine import Engine

DEFAULT: Final = "DEFAULT"
_RECORD: Final = "keyspaces"


@dataclass(frozen=True, slots=True)
class KeyspaceRecord:
    """One keyspace; ``created_at`` in unix seconds."""

    id: int
    name: str
    created_at: int


class Keyspaces:
    """All keyspaces by name. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        kept = json.loads(engine.get_meta(_RECORD) or b"[]")
        self._by_name = {each["name"]: KeyspaceRecord(**each) for each in kept}
        if not self._by_name:
            self._add(DEFAULT)

    def load(self, name: str) -> KeyspaceRecord | None:
        """The keyspace of that name, None if there is none."""
        with self._lock:
            return self._by_name.get(name)

    def all(self) -> list[KeyspaceRecord]:
        """Every keyspace, by id."""
        with self._lock:
            return sorted(self._by_name.values(), key=lambda keyspace: keyspace.id)

    def create(self, name: str) -> KeyspaceRecord:
        """Create a keyspace with the next id. Raises `PlaygroundError` when the name is taken."""
        with self._lock:
            if name in self._by_name:
                raise PlaygroundError(f"keyspace {name} exists already")
            return self._add(name)

    def _add(self, name: str) -> KeyspaceRecord:
        next_id = max((keyspace.id for keyspace in self._by_name.values()), default=-1) + 1
        self._by_name[name] = KeyspaceRecord(next_id, name, int(time.time()))
        record = json.dumps([asdict(keyspace) for keyspace in self._by_name.values()])
        self._engine.put_meta({_RECORD: record.encode()})
        return self._by_name[name]
