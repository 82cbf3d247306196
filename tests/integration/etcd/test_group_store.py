"""A group's state in a real etcd."""

from __future__ import annotations

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Put
from tikv_br.incremental.group.model import CaptureInfo, ChangefeedTask
from tikv_br.incremental.group.store import GroupStore
from tikv_br.records import dump


def test_a_snapshot_guards_what_is_written_on_its_strength(etcd: Etcd) -> None:
    """All keys of one cluster are read at once; a condition of it fails as soon as its key has changed."""
    store, other = GroupStore(etcd, 1001), GroupStore(etcd, 10011)
    task = ChangefeedTask("feed", 0, b"a", b"b")
    key, capture = store.keys.of("task", task.id), store.keys.of("capture", "one")
    etcd.put(key, dump(task))
    etcd.put(capture, dump(CaptureInfo("one", "", 1, "1")))
    etcd.put(other.keys.of("task", task.id), dump(task))
    seen = store.snapshot()
    assert (list(seen.tasks), list(seen.captures)) == ([task.id], ["one"])
    assert etcd.transact([seen.unchanged(key), seen.still_there(capture)], [Put(key, dump(task))]).succeeded
    assert not etcd.transact([seen.unchanged(key)], [Put(key, dump(task))]).succeeded
    etcd.delete(capture)
    etcd.put(capture, seen.items[capture].value)
    assert not etcd.transact([seen.still_there(capture)], [Put(key, dump(task))]).succeeded
