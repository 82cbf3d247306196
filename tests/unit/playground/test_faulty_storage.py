from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.waiting import eventually
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.external_storage import StorageFault, open_for
from tikv_br.playground.failpoints import FOREVER, FailpointTable
from tikv_br.playground.node import StoreNode

DATA = bytes(range(200))


def files(table: FailpointTable, folder: Path, store_id: int = 1) -> Any:  # noqa: ANN401
    """Files of a store in a folder."""
    node = cast("StoreNode", SimpleNamespace(failpoints=table, store_id=store_id))
    return open_for(node, brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(folder))))


def test_a_write_fails_before_or_after_its_effect(tmp_path: Path) -> None:
    """The store reports the failpoint's error; only with `after` the file exists."""
    table = FailpointTable()
    table.add({"rpc": "storage.write", "action": {"storage_error": {"message": "SlowDown"}}})
    table.add({"rpc": "storage.write", "action": {"storage_error": {"message": "lost", "after": True}}})
    for name, message in (("one", "SlowDown"), ("two", "lost")):
        with pytest.raises(StorageFault, match=message) as raised:
            files(table, tmp_path).write(name, DATA)
        assert raised.value.debug == f'Io(Custom {{ kind: Other, error: "{message}" }})'
    files(table, tmp_path).write("three", DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three", "two"]


def test_a_read_fails_or_gives_other_bytes(tmp_path: Path) -> None:
    """An error, a file cut short, one with a single bit altered; then the file as it is, which all the time it was."""
    table = FailpointTable()
    actions: list[dict[str, object]] = [{"storage_error": {"message": "reset"}}, {"cut": {}}, {"flip": {}}]
    for action in actions:
        table.add({"rpc": "storage.read", "store_id": 1, "action": action})
    (tmp_path / "file").write_bytes(DATA)
    assert files(table, tmp_path, store_id=2).read("file") == DATA
    with pytest.raises(StorageFault, match="reset"):
        files(table, tmp_path).read("file")
    cut = files(table, tmp_path).read("file")
    assert len(cut) < len(DATA)
    assert DATA.startswith(cut)
    flipped = files(table, tmp_path).read("file")
    assert sum((one ^ other).bit_count() for one, other in zip(flipped, DATA, strict=True)) == 1
    assert files(table, tmp_path).read("file") == DATA


def test_a_full_disk_leaves_half_a_file_a_moment_later(tmp_path: Path) -> None:
    """The answer is that of a real store, which still finishes what it has begun."""
    table = FailpointTable()
    table.add({"rpc": "storage.write", "action": {"disk_full": {}}})
    with pytest.raises(StorageFault) as raised:
        files(table, tmp_path).write("one", DATA)
    assert raised.value.debug == 'Io(Os { code: 28, kind: StorageFull, message: "No space left on device" })'
    assert not list(tmp_path.iterdir())
    eventually((tmp_path / "one").exists)
    assert (tmp_path / "one").read_bytes() == DATA[:100]


def test_a_share_of_the_calls_is_struck(tmp_path: Path) -> None:
    """With a chance of a tenth, about a tenth; the same ones with the same seed."""

    def struck() -> list[bool]:
        table = FailpointTable()
        action = {"storage_error": {"message": "on purpose"}}
        table.add({"rpc": "storage.read", "count": FOREVER, "chance": 0.1, "seed": 5, "action": action})
        return [table.intercept_storage("storage.read", store_id=1) is not None for _ in range(1000)]

    first = struck()
    assert 60 < sum(first) < 140
    assert struck() == first


@pytest.mark.parametrize(
    ("rpc", "action"),
    [("RawPut", {"flip": {}}), ("storage.write", {"flip": {}}), ("storage.read", {"drop": {}})],
)
def test_trouble_of_storage_belongs_to_its_points(rpc: str, action: object) -> None:
    """Impossible combinations are refused: a failpoint that never strikes would prove nothing."""
    with pytest.raises(PlaygroundError, match="failpoint"):
        FailpointTable().add({"rpc": rpc, "action": action})
