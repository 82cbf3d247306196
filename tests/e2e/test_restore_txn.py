"""`restore txn` as a user runs it, of backups that real stores wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.live_cluster import live_cluster, make_keyspaces
from tests.support.live_txn_backups import delete_range, read_rows, write_rows
from tests.support.tools import GOLDEN_BACKUPS
from tests.support.txn_backups import make_backup, recorded_rows
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

DRIVER = ("--executor", "driver", "--output", "json")


@pytest.fixture
def backup(golden: Path, tmp_path: Path) -> str:
    """A backup of keyspace 1."""
    url = f"local://{tmp_path / 'backup'}"
    make_backup(open_store(parse(url)), golden / "txn" / "v2" / "full")
    return url


def test_restores_by_the_command_line(backup: str, golden: Path, tmp_path: Path) -> None:
    """In place with new and with kept timestamps, a part into another keyspace, and nothing in a dry run."""
    rows = {key[4:]: value for key, value in recorded_rows(golden / "txn" / "v2" / "full")}
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live:
        make_keyspaces(live, 9)
        to = ("--pd", live.pd, *DRIVER)
        planned = succeed("restore", "txn", backup, *to, "--dry-run").lines
        assert {line["message_type"] for line in planned} >= {"plan", "summary"}
        assert read_rows(live, 1) == {}
        report = tmp_path / "report.json"
        summary = succeed("restore", "txn", backup, *to, "--report", str(report)).last
        assert '"verdict": "passed"' in report.read_text()
        assert (summary["verified"], summary["key_mode"], summary["total_kvs"]) == (True, "txn", len(rows))
        assert read_rows(live, 1, ts=summary["restamp_ts"]) == rows
        again = tikv_br("restore", "txn", backup, *to)
        assert again.code == 0, again.err
        assert "already holds this backup" in again.out
        write_rows(live, {b"more": b"of a client"}, 1)
        assert tikv_br("restore", "txn", backup, *to).code == 40
        delete_range(live, 1)
        kept = succeed("restore", "txn", backup, *to, "--keep-timestamps").last
        assert (kept["restamp_ts"], read_rows(live, 1, ts=kept["backup_ts"])) == (0, rows)
        prefix = sorted(rows)[len(rows) // 2][:1]
        chosen = ("--prefix", f"hex:{prefix.hex()}", "--to-keyspace", "6")
        succeed("restore", "txn", backup, *to, *chosen)
        assert read_rows(live, 6) == {key: value for key, value in rows.items() if key.startswith(prefix)}
        assert tikv_br("restore", "txn", backup, *to, *chosen, "--start", "a").code == 2
        part = ("--rewrite-prefix", f"hex:{prefix.hex()}=hex:{b'renamed/'.hex()}", "--to-keyspace", "7")
        succeed("restore", "txn", backup, *to, *part)
        renamed = {b"renamed/" + key[1:]: value for key, value in rows.items() if key.startswith(prefix)}
        assert read_rows(live, 7) == renamed


def test_the_other_kind_of_backup(backup: str, golden: Path, tmp_path: Path) -> None:
    """Each command refuses the other's backups, and names the right one."""
    raw = str(golden / "backups" / GOLDEN_BACKUPS[0] / "data")
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live:
        for wrong, right, place in (("raw", "txn", backup), ("txn", "raw", raw)):
            refused = tikv_br("restore", wrong, place, "--pd", live.pd)
            assert refused.code == 33, refused.err
            assert f"tikv-br restore {right}" in refused.err
