from __future__ import annotations

import fcntl
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.incremental.changes import Change, batch
from tests.unit.incremental.sink_suite import PAST, SinkSuite, State
from tikv_br.errors import OutputClosed, StorageFull, StorageReadOnly
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.open import FileSink, StreamSink


def followed(text: bytes) -> dict[bytes, bytes]:
    """The live rows of one who reads the lines."""
    state: dict[bytes, bytes] = {}
    for line in text.splitlines():
        row = json.loads(line)
        state.pop(key := bytes.fromhex(row["key"]), None)
        if row["op"] == "put" and row.get("expire_ts", 0) != PAST:
            state[key] = bytes.fromhex(row["value"])
    return state


class TestFileSink(SinkSuite):
    """A file."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """File of the lines."""
        return tmp_path / "changes.jsonl"

    @pytest.fixture
    def sink(self, path: Path) -> Iterator[Sink]:
        """See `SinkSuite.sink`."""
        sink = FileSink(path)
        yield sink
        sink.close()

    @pytest.fixture
    def state(self, path: Path) -> State:
        """See `SinkSuite.state`."""
        return lambda: followed(path.read_bytes())

    def test_the_form_of_lines(self, sink: Sink, path: Path) -> None:
        """Exactly the documented objects, one a line."""
        sink.write(batch([Change(5, b"a", b"\xff", 9), Change(6, b"b", b""), Change(7, b"c", deleted=True)]))
        assert path.read_text().splitlines() == [
            '{"op": "put", "key": "61", "value": "ff", "expire_ts": 9, "ts": 5}',
            '{"op": "put", "key": "62", "value": "", "ts": 6}',
            '{"op": "delete", "key": "63", "ts": 7}',
        ]

    @pytest.mark.parametrize("half", [b'{"op": "pu', b"x" * 200_000])
    def test_half_a_line_of_a_killed_writer_goes(self, path: Path, half: bytes) -> None:
        """The next writer begins where the last whole line ends."""
        for before in (b"", b'{"op": "delete", "key": "00", "ts": 1}\n'):
            path.write_bytes(before + half)
            sink = FileSink(path)
            sink.write(batch([Change(7, b"c", deleted=True)]))
            sink.close()
            assert path.read_bytes() == before + b'{"op": "delete", "key": "63", "ts": 7}\n'

    def test_the_file_is_unchanged_before_the_first_write(self, path: Path) -> None:
        """A process that opens the file, and then finds the sync claimed by another, has changed nothing."""
        path.write_bytes(b'{"op": "pu')
        FileSink(path).close()
        assert path.read_bytes() == b'{"op": "pu'

    def test_a_batch_under_way_is_no_half_line(self, path: Path) -> None:
        """A second writer waits until the first has written its lines whole, then adds its own."""
        path.touch()
        second, done = FileSink(path), threading.Event()
        change = batch([Change(7, b"c", deleted=True)])

        def write() -> None:
            second.write(change)
            done.set()

        thread = threading.Thread(target=write)
        with path.open("ab", buffering=0) as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            first.write(b'{"op": "delete", ')
            thread.start()
            assert not done.wait(0.2)
            first.write(b'"key": "62", "ts": 6}\n')
            fcntl.flock(first, fcntl.LOCK_UN)
        thread.join(60)
        second.close()
        assert done.is_set()
        assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["62", "63"]

    def test_a_full_disk_leaves_whole_lines(self, sink: Sink, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a full disk the error names it, and the file ends with the last whole batch."""
        sink.write(batch([Change(1, b"a", b"1")]))
        before = path.read_bytes()

        def full(_descriptor: int) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull, match=r"changes\.jsonl"):
            sink.write(batch([Change(2, b"b", b"1")]))
        assert path.read_bytes() == before

    def test_a_new_file_is_one_that_a_crash_leaves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its name is on disk before anything is confirmed; that of a file with lines in it is there already."""
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
        path = tmp_path / "new.jsonl"
        FileSink(path).close()
        assert synced == [tmp_path.stat().st_ino]
        path.write_bytes(b"{}\n")
        FileSink(path).close()
        assert len(synced) == 1

    def test_a_place_that_is_none(self, tmp_path: Path) -> None:
        """A missing folder is said at once."""
        with pytest.raises(StorageReadOnly, match="missing"):
            FileSink(tmp_path / "missing" / "file")


class TestStreamSink(SinkSuite):
    """A stream."""

    @pytest.fixture
    def stream(self) -> io.BytesIO:
        """Stream of the lines."""
        return io.BytesIO()

    @pytest.fixture
    def sink(self, stream: io.BytesIO) -> Sink:
        """See `SinkSuite.sink`."""
        return StreamSink(stream)

    @pytest.fixture
    def state(self, stream: io.BytesIO) -> State:
        """See `SinkSuite.state`."""
        return lambda: followed(stream.getvalue())

    def test_a_reader_that_has_gone(self) -> None:
        """Writing into a pipe without a reader ends the command as for any other output."""
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as pipe, pytest.raises(OutputClosed):
            StreamSink(pipe).write(batch([Change(1, b"a", b"1")]))

    def test_a_full_disk_behind_it_is_said(self) -> None:
        """Standard output may be a file."""

        class Full(io.BytesIO):
            def flush(self) -> None:
                raise OSError(28, os.strerror(28))

        with pytest.raises(StorageFull, match="standard output"):
            StreamSink(Full()).write(batch([Change(1, b"a", b"1")]))
