"""Announcements of ingests, in PD's etcd, by which followers of a cluster learn of rows that no change feed delivers.

Keys, after ``/tikv-br/CLUSTER-ID/``::

    ingest/ID          Ingest     written before the first file and after the last one
    ingest-revision    an id      written with each change of an announcement: one read shows whether there is news
    ingest-alive/ID    empty      with the lease of the command that ingests
    follower/SERVICE   version    a follower that reads announcements, by the name of its safe point in PD;
                                  after a space, a `Follower`
    writer/ID/SERVICE  version    a follower of another cluster, with that id, which writes to this one: changed with each of its starts

**New timestamps.** The new timestamp is fetched from PD after the announcement is in etcd. A follower that holds a resolved-ts
above it reads announcements, linearizably, before it passes that resolved-ts on, and so sees this one. See
docs/adr/0023-ingests-are-announced.md.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Final, Self

from msgspec import Struct, structs

from tikv_br import __version__, records
from tikv_br.backupset.lease import LeaseOwner
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.cluster.etcd_values import Delete, KeyValue, Put, modified_at, unchanged
from tikv_br.errors import BackupDamaged, BackupUnsupported, EtcdRefused
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.records import Later

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 60
"""Seconds until another command may finish the announcement of a killed one: its last requests have ended by then."""
CDC_CHANGEFEEDS: Final = "/tikv/cdc/changefeed/info/"
"""Prefix of TiKV-CDC's changefeeds in etcd."""
_CDC_ENDED: Final = frozenset({"finished", "removed"})


class Ingest(Struct, frozen=True):
    """One announced ingest."""

    id: str
    """Unique; starts with the id of the restore, so that a resumed one finds its own."""
    command: str
    ranges: tuple[KeyRange, ...]
    """RPC keys of the cluster."""
    announced_ts: int
    """A timestamp of PD from before the announcement."""
    lowest_ts: int | None = None
    """No row has an older timestamp; 0 = rows keep their own timestamps; None = no file is ingested yet."""
    finished_ts: int = 0
    """A timestamp of PD from after the last file; 0 = unfinished: more rows may come."""

    def overlaps(self, span: KeyRange) -> bool:
        """Return whether the ingest has keys of a range of RPC keys."""
        return any(not intersection(each, span).is_empty for each in self.ranges)

    def concerns(self, span: KeyRange, after_ts: int) -> bool:
        """Return whether a follower of `span` that has all changes up to `after_ts` may lack rows of the ingest."""
        return self.overlaps(span) and not 0 < self.finished_ts <= after_ts

    def can_be_followed(self, after_ts: int) -> bool:
        """Return whether a scan of all changes after `after_ts` delivers the ingest's rows."""
        return self.lowest_ts is None or self.lowest_ts > after_ts

    def __str__(self) -> str:
        return f"{self.command} ({self.id})"


class Follower(Struct, frozen=True):
    """A follower."""

    state: str
    """The place of its state."""
    owner: LeaseOwner | None = None
    """Its process; None = several, or an earlier version registered it."""
    target: Later[int] = 0
    """Id of the cluster that it writes to; 0 = none, or an earlier version registered it."""
    keyspaces: Later[tuple[int, int]] = (0, 0)
    """Keyspaces of source and target."""
    spans: Later[tuple[KeyRange, ...]] = ()
    """Ranges of user keys that it writes there."""
    has_ended: Later[bool] = False
    """False = it runs, or was killed."""

    def returns(self, other: Follower, cluster_id: int) -> bool:
        """Return whether this one, whose source is the target of `other`, writes rows back that `other` reads in a cluster."""
        return (self.target, self.keyspaces) == (cluster_id, other.keyspaces[::-1]) and any(
            not intersection(mine, theirs).is_empty for mine in self.spans for theirs in other.spans
        )

    @property
    def is_gone(self) -> bool:
        """Return whether its process has certainly ended."""
        return self.owner is not None and self.owner.is_gone


class Ingests:
    """The announcements of one cluster. Raises `EtcdError`."""

    def __init__(self, etcd: Etcd, cluster_id: int) -> None:
        self._etcd = etcd
        root = f"/tikv-br/{cluster_id}/"
        self._prefix, self._news, self._alive = f"{root}ingest/", f"{root}ingest-revision", f"{root}ingest-alive/"
        self._followers, self._writers = f"{root}follower/", f"{root}writer/"

    def read(self) -> tuple[Ingest, ...]:
        return tuple(map(_load, self._etcd.range(self._prefix).items))

    def revision(self) -> int:
        """The revision of the last change of any announcement; 0 = there was none."""
        item = self._etcd.get(self._news)
        return 0 if item is None else item.mod_revision

    def save(self, ingest: Ingest) -> int:
        """Write an announcement; returns its revision."""
        return self._etcd.transact((), self._puts(ingest), repeatable=True).revision

    def finish(self, ingest: Ingest, revision: int, now_ts: int) -> None:
        """Record that no more rows come.

        If another command has already finished the ingest, announce it again under a new id.
        """
        done = structs.replace(ingest, finished_ts=now_ts)
        ours = modified_at(self._prefix + ingest.id, revision)
        if not self._etcd.transact([ours], self._puts(done), repeatable=True).succeeded:
            self.save(structs.replace(done, id=f"{ingest.id}-{secrets.token_hex(4)}"))

    def withdraw(self, ingest: Ingest) -> None:
        """Remove an announcement of which no file was ingested."""
        self._etcd.transact((), self._removals([ingest.id]), repeatable=True)

    def clean_up(
        self, now_ts: int, gc_safe_point: int, live_services: Iterable[str], killed: Collection[str] = ()
    ) -> None:
        """Finish the announcements of killed commands, and remove what no follower needs any more.

        That is: announcements that GC has passed, since no follower starts before its safe point; followers without a safe point.
        `killed` are ids of restores that have ended, although their leases may have not.
        """
        alive = {item.key.removeprefix(self._alive) for item in self._etcd.range(self._alive).items}
        for item in self._etcd.range(self._prefix).items:
            found = _load(item)
            if found.finished_ts:
                if found.finished_ts < gc_safe_point:
                    self._etcd.transact([unchanged(item)], self._removals([found.id]), repeatable=True)
            elif found.id not in alive or found.id.rpartition("-")[0] in killed:
                log.warning("%s has ended without a word: its rows so far are passed on to followers", found)
                changes = self._puts(structs.replace(found, finished_ts=now_ts))
                self._etcd.transact(
                    [unchanged(item)],
                    changes if found.lowest_ts is not None else self._removals([found.id]),
                    repeatable=True,
                )
        for service in self.followers() - set(live_services):
            self._etcd.delete(self._followers + service)

    def hold(self, ingest: Ingest) -> LeaseHolder:
        """A lease, to be entered, that shows that the command is alive."""
        return _Alive(self._etcd, f"{self._alive}{ingest.id}")

    def register_follower(self, service: str, follower: Follower) -> None:
        """Note that the follower with this safe point reads announcements, and that it runs or has ended.

        Register its safe point before.
        """
        self._etcd.put(self._followers + service, _follower_value(follower))

    def follower_ended(self, service: str, ours: Follower) -> None:
        """Note the end of a follower, unless another process has registered since."""
        item = self._etcd.get(self._followers + service)
        if item is not None and item.value == _follower_value(ours):
            ended = _follower_value(structs.replace(ours, has_ended=True))
            self._etcd.transact([unchanged(item)], [Put(item.key, ended)], repeatable=True)

    def follower(self, service: str) -> Follower | None:
        """A follower that runs or was killed; None if it has ended or is unknown."""
        item = self._etcd.get(self._followers + service)
        found = None if item is None else _load_follower(item)
        return None if found is None or found.has_ended else found

    def running(self) -> dict[str, Follower]:
        """The followers that run or were killed, by the names of their safe points."""
        return {service: found for service, (found, _) in self._known().items() if not found.has_ended}

    def _known(self) -> dict[str, tuple[Follower, int]]:
        """All followers with their records, and the revisions in which they last started or ended."""
        items = self._etcd.range(self._followers).items
        return {
            item.key.removeprefix(self._followers): (found, item.mod_revision)
            for item in items
            if (found := _load_follower(item))
        }

    def register_writer(self, service: str, source_id: int) -> None:
        """Note that a follower of another cluster begins to write to this one."""
        self._etcd.put(f"{self._writers}{source_id}/{service}", __version__.encode())

    def returned_since(self, service: str, source_id: int, ours: Follower) -> list[str]:
        """The safe points of followers that have copied rows back to the source of a writer since it last began."""
        began = self._etcd.get(f"{self._writers}{source_id}/{service}")
        return [
            name
            for name, (each, revision) in self._known().items()
            if began is not None and revision > began.mod_revision and each.returns(ours, source_id)
        ]

    def followers(self) -> set[str]:
        """The names of the safe points of followers that read announcements."""
        return {item.key.removeprefix(self._followers) for item in self._etcd.range(self._followers).items}

    def tikv_cdc(self) -> list[str]:
        found = self._etcd.range(CDC_CHANGEFEEDS).items
        return [item.key.removeprefix(CDC_CHANGEFEEDS) for item in found if _cdc_state(item) not in _CDC_ENDED]

    def _puts(self, ingest: Ingest) -> list[Put | Delete]:
        key = self._prefix + ingest.id
        return [Put(key, records.dump(ingest)), Put(self._news, ingest.id.encode())]

    def _removals(self, ids: Iterable[str]) -> list[Put | Delete]:
        return [*(Delete(self._prefix + each) for each in ids), Put(self._news, b"")]


class _Alive(LeaseHolder):
    """A lease with the one key that shows that a command is alive."""

    def __init__(self, etcd: Etcd, key: str) -> None:
        super().__init__(etcd, LEASE_SECONDS)
        self._put: Callable[[], object] = lambda: etcd.put(key, b"", self.lease)

    def __enter__(self) -> Self:
        super().__enter__()
        self._put()
        return self


def _follower_value(follower: Follower) -> bytes:
    return __version__.encode() + b" " + records.dump(follower)


def _load_follower(item: KeyValue) -> Follower | None:
    written = item.value.partition(b" ")[2]
    try:
        return records.load(Follower, written, item.key) if written else None
    except (BackupDamaged, BackupUnsupported):
        return Follower(written.decode(errors="replace"))  # earlier versions wrote only the state


def _load(item: KeyValue) -> Ingest:
    try:
        return records.load(Ingest, item.value, item.key)
    except (BackupDamaged, BackupUnsupported) as error:
        raise EtcdRefused(
            f"etcd: the announcement of an ingest cannot be read: {error.message}",
            hint="Use the newest tikv-br of the group.",
        ) from None


def _cdc_state(item: KeyValue) -> str:
    try:
        return str(json.loads(item.value).get("state", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""
