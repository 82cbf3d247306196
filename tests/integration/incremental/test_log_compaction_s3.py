"""Compaction of a log on S3: breadth by moto, truth by versitygw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.s3_servers import S3Server, moto_server, versitygw_server
from tests.unit.archive.samples import LOG, START, STEP, WHOLE, rows_of, write_log
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import acquire_lock
from tikv_br.errors import LeaseHeld
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.open import open_store


@pytest.fixture(scope="module", params=["moto", "versitygw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Each kind of server in turn."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    with moto_server() if request.param == "moto" else versitygw_server(folder) as running:
        yield running


@pytest.mark.parametrize("key", ["", "07" * 32], ids=["plain", "encrypted"])
def test_a_log_on_s3(server: S3Server, key: str) -> None:
    """The compacted log has few objects with the same rows; one run owns the path."""
    crypter = Crypter.of("", SecretText(key))
    store = open_store(replace(server.location(f"log-{crypter.method}"), crypter=crypter))
    write_log(store)
    until = START + 6 * STEP
    expected = rows_of(LogArchive.open(store, LOG), WHOLE, START, until)
    options = CompactionOptions(store.location, LOG, grace=0.0, executor="driver")
    with acquire_lock(store, LOG, "log truncate"), pytest.raises(LeaseHeld):
        compact(options)
    done = compact(options)
    assert (done.segments, done.new_segments, done.removed_segments, done.removed_files) == (6, 1, 6, 6)
    log = LogArchive.open(store, LOG)
    assert (len(log.segments), log.replaced, log.damage) == (1, (), ())
    assert log.verify_files(whole=True) == []
    assert rows_of(log, WHOLE, START, until) == expected
    names = [info.name for info in store.list(LOG)]
    assert sorted(name.split("/")[1] for name in names) == ["data", "log.json", "segments", "state"]
