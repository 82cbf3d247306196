"""The commands that look after backups, with transactional ones whose files real stores wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.txn_backups import make_backup, make_foreign_backup, recorded_rows
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture
def recorded(golden: Path) -> Path:
    """A recorded backup of keyspace 1."""
    return golden / "txn" / "v2" / "full"


@pytest.fixture
def root(recorded: Path, tmp_path: Path) -> str:
    """The URL of a folder with that backup by tikv-br and by BR."""
    root = f"local://{tmp_path}"
    make_backup(open_store(parse(f"{root}/ours")), recorded)
    make_foreign_backup(open_store(parse(f"{root}/theirs")), recorded)
    succeed("list", root, "--rebuild")
    return root


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_looking_after_transactional_backups(root: str, recorded: Path, tmp_path: Path, name: str) -> None:
    """The list, each view, single values and verification of a backup, found by URL and by id."""
    rows = recorded_rows(recorded)
    listed = {line["path"]: line for line in succeed("list", root, "--output", "json").lines}[name]
    assert (listed["key_mode"], listed["total_kvs"]) == ("txn", len(rows))
    assert " v2 txn " in succeed("list", root).out
    summary = succeed("show", f"{root}/{name}", "--output", "json").last
    assert (summary["key_mode"], summary["total_kvs"], summary["keyspaces"]) == ("txn", len(rows), [1])
    assert summary["crc64xor"]
    assert summary["made_by"].startswith({"ours": "tikv-br", "theirs": "TiDB BR"}[name])
    files = succeed("show", "-s", root, listed["id"], "--view", "files", "--output", "json").lines
    assert {line["cf"] for line in files} == {"default", "write"}
    for key, value in rows[:: len(rows) // 6]:
        found = succeed("cat", f"{root}/{name}", f"hex:{key[4:].hex()}", "--output", "json").last
        assert (found["value"], found["expire_ts"], found["expired"]) == (value.hex(), 0, False)
    assert tikv_br("cat", f"{root}/{name}", "no such key").code == 13
    page = tmp_path / "report.html"
    to_page = ("--executor", "driver", "--report", str(page), "--output", "json")
    verified = succeed("verify", f"{root}/{name}", "--level", "data", *to_page).last
    assert f"{len(rows):,}" in page.read_text()
    assert "no keyspace map" not in page.read_text()
    assert verified["rows_checked"] == len(rows)


def test_pins_and_prune(root: str, recorded: Path) -> None:
    """Prune removes the older of two that are not pinned, both objects of each part and the entry."""
    make_backup(open_store(parse(f"{root}/later")), recorded)
    succeed("list", root, "--rebuild")
    listed = {line["path"]: line["id"] for line in succeed("list", root, "--output", "json").lines}
    prune = ("prune", "-s", root, "--keep-last", "1", "--yes", "--output", "json")
    succeed("backup", "pin", "-s", root, listed["ours"])
    assert succeed(*prune).last["removed"] == 0
    succeed("backup", "unpin", "-s", root, listed["ours"])
    assert succeed(*prune).last["removed"] == 1
    assert {line["path"] for line in succeed("list", root, "--output", "json").lines} == {"theirs", "later"}
    assert not list(open_store(parse(f"{root}/ours")).list())


def test_commands_for_raw_data_refuse(root: str, tmp_path: Path) -> None:
    """The message names the mode of the data, and the command for it."""
    done = tikv_br("export", "raw", "--from-backup", f"{root}/ours", "--storage", str(tmp_path / "rows"))
    assert done.code == 33, done.err
    assert "is a backup of TxnKV data" in done.err
    assert "restore txn" in done.err
