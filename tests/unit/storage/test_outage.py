"""Waiting for a storage location that does not answer, with a clock of the test's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.accepting import accepting
from tests.support.waiting import eventually
from tikv_br import retry
from tikv_br.errors import StorageUnreachable, TikvBrError
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import LocationHealth, StorageAway
from tikv_br.storage.url import CloudFlags, S3Options, parse

PATIENCE = 10.0


@pytest.mark.parametrize("away", [0.0, 5.0, PATIENCE - 0.01, PATIENCE + 0.01])
@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_all_of_the_patience_is_used(away: float, chance: float) -> None:
    """A location that comes back within the patience is waited for, whatever the pauses between two tries."""
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def ask() -> TikvBrError | None:
        return None if now >= 1000.0 + away else StorageUnreachable("connection refused")

    health = LocationHealth("storage", clock=lambda: now, sleep=sleep, chance=lambda: chance)
    health.succeeded()
    health.failed(now)
    if away > PATIENCE:
        with pytest.raises(StorageAway, match="connection refused; gave up after 10 s"):
            health.wait(ask, PATIENCE)
        assert now == pytest.approx(1000.0 + PATIENCE)
    else:
        health.wait(ask, PATIENCE)
        assert health.is_answering


def test_a_storage_that_hangs_is_logged_though_no_request_has_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, and answers nothing; the line names endpoint and bucket."""
    monkeypatch.setattr(retry, "REPORT_SECONDS", 0.3)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with accepting(lambda _connection: None) as address, ThreadPoolExecutor(1) as pool:
        store = open_store(
            parse(f"s3://bucket/path?endpoint=http://{address}&region=us-east-1", CloudFlags(S3Options(patience=1)))
        )
        asked = pool.submit(store.get, "object")
        try:
            eventually(lambda: "has not answered for" in caplog.text)
        finally:
            assert isinstance(asked.exception(), StorageUnreachable)
    assert f"storage http://{address} bucket has not answered" in caplog.text
