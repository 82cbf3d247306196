"""The shared RocksDB."""

from __future__ import annotations

import gc
from pathlib import Path

from rocksdict import Options, Rdict

from tikv_br.playground.engine import RocksEngine

ROWS = [(b"z%04d" % number, b"v%d" % number) for number in range(1000)]


def test_the_database_is_plain_rocksdb(tmp_path: Path) -> None:
    """Another program that opens the database finds the rows under their keys."""
    engine = RocksEngine.open(tmp_path)
    engine.write([(b"za", b"1"), (b"zb", b"2"), (b"za", b"3")], [b"zb"])
    engine.close()
    with Rdict(str(tmp_path), Options(raw_mode=True)) as db:
        assert dict(db.items()) == {b"za": b"3"}


def test_ranges_forward_and_backward(engine: RocksEngine) -> None:
    """Both bounds hold in both directions; no end means all data and nothing of the playground's own records."""
    engine.put_meta({"below": b"data"})
    engine.write([*ROWS, (b"z\xff\xff", b"last")])
    assert list(engine.iterate(b"z0100", b"z0103")) == ROWS[100:103]
    assert list(engine.iterate(b"z0100", b"z0103", reverse=True)) == ROWS[102:99:-1]
    assert list(engine.iterate(b"z0999", b"")) == [ROWS[-1], (b"z\xff\xff", b"last")]
    assert next(engine.iterate(b"", b"", reverse=True)) == (b"z\xff\xff", b"last")
    assert len(list(engine.iterate(b"", b""))) == len(ROWS) + 1
    assert list(engine.iterate(b"z5", b"z5")) == list(engine.iterate(b"z6", b"z5")) == []


def test_an_iterators_bound_outlives_its_options(engine: RocksEngine) -> None:
    """The upper bound holds although only the iterator is kept: its memory must not be given back early."""
    engine.write(ROWS)
    for _ in range(100):
        rows = engine.iterate(b"z0000", b"z0500")
        first = next(rows)
        gc.collect(0)
        noise = [bytes([number % 256]) * 16 for number in range(100)]
        assert [first, *rows] == ROWS[:500]
        del noise


def test_an_iterator_sees_one_moment(engine: RocksEngine) -> None:
    """Rows written after the first one was taken do not appear."""
    engine.write(ROWS[:2])
    rows = engine.iterate(b"", b"")
    taken = [next(rows)]
    engine.write([ROWS[5]], [ROWS[1][0]])
    assert [*taken, *rows] == ROWS[:2]


def test_delete_range(engine: RocksEngine) -> None:
    """The range goes, its end stays, and no end takes the rest without the playground's own records."""
    engine.put_meta({"kept": b"1"})
    engine.write(ROWS)
    engine.delete_range(b"z0100", b"z0900")
    assert [key for key, _ in engine.iterate(b"z0099", b"z0901")] == [b"z0099", b"z0900"]
    engine.delete_range(b"z0500", b"")
    assert len(list(engine.iterate(b"", b""))) == 100
    assert engine.get_meta("kept") == b"1"


def test_own_records(engine: RocksEngine) -> None:
    """Records are listed by prefix in order, and None removes one."""
    engine.put_meta({"region/2": b"b", "region/1": b"a", "regions": b"other", "tso": b"t"})
    assert list(engine.list_meta("region/")) == [("region/1", b"a"), ("region/2", b"b")]
    engine.put_meta({"region/1": None})
    assert engine.get_meta("region/1") is None
