"""Looking after backups as a user does: listed, shown, read, pinned, pruned, and every wrong input with its exit code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import Done, succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.integration.s3_servers import ACCESS_KEY, SECRET_KEY, moto_server, versitygw_server

VALUE = "value of the first day"


@pytest.fixture(scope="module")
def made(playgrounds: Playgrounds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two backups of a V1TTL cluster; between them one key changed."""
    root = tmp_path_factory.mktemp("root")
    pd = playgrounds["v1ttl"]
    succeed("raw", "put", "changing", VALUE, "--pd", pd)
    succeed("raw", "put", "lasting", "dGhlIHNhbWU", "--ttl", "1000h", "--pd", pd)
    back_up(pd, root / "first")
    succeed("raw", "put", "changing", "value of the second day", "--pd", pd)
    back_up(pd, root / "second")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> str:
    """A copy of that folder."""
    shutil.copytree(made, tmp_path / "root")
    return f"local://{tmp_path / 'root'}"


def back_up(pd: str, place: Path | str) -> Done:
    """Make a backup without Spark."""
    return succeed("backup", "raw", "--pd", pd, "-s", str(place), "--executor", "driver", "--output", "json")


def backups(root: str) -> list[dict[str, object]]:
    """Listed backups, newest first."""
    return [without_run_id(line) for line in succeed("list", "-s", root, "--output", "json").lines]


def without_run_id(line: dict[str, object]) -> dict[str, object]:
    """Return a line as another run would write it."""
    return {name: value for name, value in line.items() if name != "run_id"}


def ids(root: str) -> list[str]:
    """Only the ids."""
    return [str(line["id"]) for line in backups(root)]


def test_backups_enter_the_list_by_themselves(root: str) -> None:
    """Two backups made, two listed, newest first, with the figures of their summaries."""
    second, first = backups(root)
    assert (second["path"], first["path"]) == ("second", "first")
    assert (first["total_kvs"], first["api_version"], first["dst_api_version"]) == (2, "v1ttl", "v1ttl")
    assert first["message_type"] == "backup"
    assert first["engine"] in {"scan", "store"}
    assert not first["pinned"]
    assert abs(int(str(first["finished_ms"])) / 1000 - time.time()) < 3600


def test_list_for_people(root: str) -> None:
    """One line a backup below the names of the columns."""
    lines = succeed("list", "-s", root).out.splitlines()
    assert len(lines) == 3
    for column in ("id", "finished", "api", "kvs", "bytes", "size", "backup-ts", "engine", "pinned", "path"):
        assert column in lines[0]
    assert lines[1].endswith("second")


@pytest.mark.parametrize("by", ["id", "beginning", "place", "url"])
def test_show_by_id_and_by_place(root: str, by: str) -> None:
    """All ways to name a backup show the same one; the sums are those of the list."""
    listed = backups(root)[1]
    named = {
        "id": ("-s", root, str(listed["id"])),
        "beginning": ("-s", root, str(listed["id"])[:9]),
        "place": ("-s", f"{root}/first"),
        "url": (f"{root}/first",),
    }[by]
    summary = succeed("show", *named, "--output", "json").last
    assert summary["storage"].endswith("/first")
    assert [summary[name] for name in ("total_kvs", "total_bytes", "backup_size", "finished_ms")] == [
        listed[name] for name in ("total_kvs", "total_bytes", "backup_size", "finished_ms")
    ]
    assert summary["expiring_kvs"] == 1
    ranges = succeed("show", *named, "--view", "ranges", "--output", "json").lines
    assert [(line["start"], line["end"], line["total_kvs"]) for line in ranges] == [("", "", 2)]
    files = succeed("show", *named, "--view", "files", "--output", "json").lines
    assert sum(line["total_kvs"] for line in files) == 2
    assert "\ntotal-kv " in succeed("show", *named).out


def test_find_shows_which_backups_have_a_key(root: str) -> None:
    """Newest first, with size and SHA-256 of each value; 13 if no backup has the key."""
    found = succeed("backup", "find", "changing", "-s", root, "--output", "json").lines
    values = [b"value of the second day", VALUE.encode()]
    assert [each["path"] for each in found] == ["second", "first"]
    assert [(each["size"], each["sha256"]) for each in found] == [
        (len(value), hashlib.sha256(value).hexdigest()) for value in values
    ]
    assert "found" in succeed("backup", "find", "changing", "-s", root).out
    missing = tikv_br("backup", "find", "nothing", "-s", root, "--output", "json")
    assert (missing.code, {each["state"] for each in missing.lines[:-1]}) == (13, {"absent"})


def test_cat_reads_the_value_of_that_day(root: str) -> None:
    """Each backup has its own value of a key; expiry comes in JSON; hex works both ways."""
    second, first = ids(root)
    assert succeed("cat", "-s", root, first, "changing").out == f"{VALUE}\n"
    assert succeed("cat", "-s", root, second, "changing").out == "value of the second day\n"
    assert succeed("cat", "-s", f"{root}/first", "changing").out == f"{VALUE}\n"
    hexed = succeed("cat", "-s", root, first, b"changing".hex(), "--format", "hex").out
    assert bytes.fromhex(hexed.strip()) == VALUE.encode()
    pair = succeed("cat", "-s", root, first, "lasting", "--output", "json").last
    assert (pair["message_type"], bytes.fromhex(pair["value"]), pair["ts"]) == ("pair", b"dGhlIHNhbWU", 0)
    assert abs(pair["expire_ts"] - time.time() - 3_600_000) < 3600


def test_every_command_that_reads_a_backup_takes_its_url_its_id_or_newest(root: str, playgrounds: Playgrounds) -> None:
    """As an argument; the URL in the environment is then not needed, and not in the way. Two URLs are refused."""
    second, first = ids(root)
    assert succeed("cat", f"{root}/first", "changing").out == f"{VALUE}\n"
    assert succeed("cat", "-s", root, "newest", "changing").out == "value of the second day\n"
    assert succeed("show", "newest", "-s", root, "--output", "json").last["storage"].endswith("/second")
    assert [line["id"] for line in succeed("list", root, "--output", "json").lines] == [second, first]
    pd = ("--pd", playgrounds["v1ttl"], "--executor", "driver", "--output", "json")
    for command in (("verify", "--level", "restore"), ("diff",)):
        assert (
            succeed(*command, f"{root}/second", *pd, TIKV_BR_STORAGE=f"{root}/none").last["message_type"] == "summary"
        )
        assert succeed(*command, "newest", *pd, "-s", root).last["message_type"] == "summary"
        assert tikv_br(*command, first[:8], *pd, "-s", root).code != 0, "its value differs from the cluster's"
    for named in ((f"{root}/second",), ("newest", "-s", root), (second, "-s", root)):
        assert succeed("restore", *named, "--dry-run", "--allow-overwrite", *pd).last["total_kvs"] == 2
    for reader in ("show", "verify", "list", "restore"):
        refused = tikv_br(reader, f"{root}/first", "-s", root)
        assert (refused.code, "cannot be combined" in refused.err) == (2, True), reader
        assert "URL" in tikv_br(reader, "--output", "console").err


def test_cat_of_v2_has_timestamps(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """In API V2 a row has a ts, a moment of today; the list has the backup's."""
    pd = playgrounds["v2"]
    succeed("raw", "put", "k", "v", "--pd", pd)
    backup_ts = back_up(pd, tmp_path / "b").last["backup_ts"]
    ts = succeed("cat", "-s", str(tmp_path / "b"), "k", "--output", "json").last["ts"]
    assert abs((ts >> 18) / 1000 - time.time()) < 3600
    assert succeed("list", "-s", str(tmp_path), "--output", "json").last["backup_ts"] == backup_ts


@pytest.mark.core("index")
def test_pin_prune_unpin(root: str, tmp_path: Path) -> None:
    """A pinned backup survives a prune; unpinned, a prune that is confirmed takes it, and the other still restores."""
    second, first = ids(root)
    rules = ("prune", "-s", root, "--keep-last", "1")
    assert succeed("backup", "pin", "-s", root, first[:8], "--output", "json").last["id"] == first
    assert [line["pinned"] for line in backups(root)] == [False, True]
    assert succeed(*rules, "--confirm", "--output", "json").last["removed"] == 0
    succeed("backup", "unpin", "-s", root, first)
    planned = succeed(*rules, "--dry-run", "--output", "json").lines
    assert [(line["id"], line["action"]) for line in planned[:-1]] == [(second, "keep"), (first, "remove")]
    assert planned[0]["reasons"] == ["last"]
    unconfirmed = tikv_br(*rules)
    assert unconfirmed.code == 2
    assert "--yes" in unconfirmed.err
    assert ids(root) == [second, first]
    assert "remove" in succeed(*rules, "--dry-run", "--quiet").out
    done = succeed(*rules, "--confirm", "--output", "json").last
    assert (done["message_type"], done["removed"], done["kept"], done["dry_run"]) == ("summary", 1, 1, False)
    assert ids(root) == [second]
    assert not (tmp_path / "root" / "first").exists()
    assert succeed(*rules, "--yes", "-q").out == ""
    succeed("verify", f"{root}/second", "--level", "data", "--executor", "driver")


def test_an_index_of_others_is_told_apart_from_no_backup(root: str, tmp_path: Path) -> None:
    """Exit code 0 with nothing listed or removed comes with a warning, also for `prune`; the file stays."""
    foreign = tmp_path / "foreign" / "tikv-br" / "index" / "abc.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text('{"format_version": 1, "id": "x", "path": "../../root"}')
    for command in (("list",), ("prune", "--keep-last", "1", "--yes")):
        done = succeed(*command, "--storage", f"local://{tmp_path}/foreign")
        assert "lists no backup" in done.err, (command, done)
        assert "lists no backup" not in succeed(*command, "--storage", root).err
    assert foreign.exists()


def test_delete(root: str, tmp_path: Path) -> None:
    """By id and by URL: it asks, a dry run and a pin prevent it, and the other backup stays as it was."""
    second, first = ids(root)
    delete = ("backup", "delete", "--output", "json")
    dry = succeed(*delete, first[:8], "-s", root, "--dry-run").last
    assert (dry["id"], dry["path"], dry["dry_run"]) == (first, "first", True)
    unasked = tikv_br(*delete, first, "-s", root)
    assert (unasked.code, "--yes" in unasked.last["hint"]) == (2, True)
    succeed("backup", "pin", "-s", root, first)
    pinned = tikv_br(*delete, first, "-s", root, "--yes")
    assert (pinned.code, "is pinned" in pinned.last["message"]) == (2, True)
    assert ids(root) == [second, first]
    succeed("backup", "unpin", "-s", root, first)
    done = succeed(*delete, f"{root}/first", "--yes").last
    assert (done["id"], done["removed_bytes"] > 0, done["dry_run"]) == (first, True, False)
    assert ids(root) == [second]
    assert not (tmp_path / "root" / "first").exists()
    succeed("verify", f"{root}/second", "--level", "data", "--executor", "driver")
    assert tikv_br(*delete, first, "-s", root, "--yes").code == 31


def test_rebuild_finds_what_the_index_lost(root: str, tmp_path: Path) -> None:
    """Without its index the list is empty and no backup is lost; one rebuild brings the same list back."""
    before = backups(root)
    shutil.rmtree(tmp_path / "root" / "tikv-br-index")
    assert backups(root) == []
    rebuilt = succeed("list", "-s", root, "--rebuild", "--output", "json").lines
    assert (rebuilt[0]["message_type"], rebuilt[0]["found"], rebuilt[0]["added"]) == ("rebuilt", 2, 2)
    assert [without_run_id(line) for line in rebuilt[1:]] == before == backups(root)


def test_rebuild_tells_of_a_damaged_backup(root: str, tmp_path: Path) -> None:
    """The list is written all the same, and the exit code is that of damage."""
    (tmp_path / "root" / "first" / "tikv-br" / "manifest.json").write_text("{}")
    done = tikv_br("list", "-s", root, "--rebuild", "--output", "json")
    assert done.code == 32
    assert [line["message_type"] for line in done.lines] == ["rebuilt", "backup", "backup", "exit_error"]
    assert done.last["message"].startswith("first: ")


def test_index_that_cannot_be_written_is_a_warning(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """A file instead of the index: the backup succeeds, describes the repair of the list, and restores."""
    (tmp_path / "tikv-br-index").write_text("in the way")
    done = back_up(playgrounds["v1ttl"], tmp_path / "b")
    assert done.last["message_type"] == "summary"
    assert "list --rebuild" in done.err
    succeed("verify", str(tmp_path / "b"), "--executor", "driver")


@pytest.mark.usefixtures("made")
def test_the_same_over_s3(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Backup, list, cat and prune on a real S3 server; no secret is shown anywhere."""
    with versitygw_server(tmp_path / "s3") as server:
        for name in ("one", "two"):
            back_up(playgrounds["v1ttl"], server.url(f"drills/{name}"))
        root = server.url("drills")
        said = succeed("list", "-s", root, "--output", "json")
        assert [line["path"] for line in said.lines] == ["two", "one"]
        assert succeed("cat", "-s", root, said.last["id"], "lasting").out == "dGhlIHNhbWU\n"
        pruned = succeed("prune", "-s", root, "--keep-daily", "1", "--confirm")
        assert [line["path"] for line in backups(root)] == ["two"]
        left = {item["Key"] for item in server.admin.list_objects_v2(Bucket="backups")["Contents"]}
        assert not any(key.startswith("drills/one/") for key in left)
        assert SECRET_KEY not in said.out + said.err + pruned.out + pruned.err


AWS = """
import sys, boto3, jmespath, argparse
words = argparse.ArgumentParser()
for name in ("command", "operation", "--endpoint-url", "--bucket", "--prefix", "--query", "--output", "--key", "--version-id"):
    words.add_argument(name)
said = words.parse_args()
s3 = boto3.client("s3", endpoint_url=said.endpoint_url)
if said.operation == "delete-object":
    s3.delete_object(Bucket=said.bucket, Key=said.key, VersionId=said.version_id)
else:
    found = s3.list_object_versions(Bucket=said.bucket, Prefix=said.prefix)
    for row in jmespath.search(said.query, found) or ():
        print(*row, sep="\\t")
"""
"""The two calls of the AWS client that an undo consists of, by Amazon's own library."""


@pytest.mark.usefixtures("made")
def test_the_undo_of_a_prune_brings_back_what_it_removed(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """In a bucket with versioning, by the commands that `prune` prints."""
    with moto_server() as server:
        server.admin.put_bucket_versioning(Bucket="backups", VersioningConfiguration={"Status": "Enabled"})
        for name in ("one", "two"):
            back_up(playgrounds["v1ttl"], server.url(f"drills/it's {name}"))
        root = server.url("drills")
        pruned = succeed("prune", "-s", root, "--keep-last", "1", "--confirm", "--output", "json")
        assert len(backups(root)) == 1
        undo = [str(each["command"]) for each in pruned.lines if each["message_type"] == "undo"]
        assert SECRET_KEY not in "".join(undo)
        aws = tmp_path / "aws"
        aws.write_text(f"#!{sys.executable}\n{AWS}")
        aws.chmod(0o755)
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": "us-east-1"}
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["sh", "-c", undo[0]], env={**os.environ, **keys, "PATH": path}, check=True)
        succeed("list", "-s", root, "--rebuild")
        assert len(backups(root)) == 2
        succeed("verify", server.url("drills/it's one"), "--executor", "driver")


def test_list_of_a_backup_shows_it(root: str) -> None:
    """The URL of a backup lists that backup, with its own URL and pin, and a note."""
    one = next(line for line in backups(root) if line["path"] == "first")
    succeed("backup", "pin", "-s", root, str(one["id"]))
    shown = succeed("list", "-s", f"{root}/first", "--output", "json")
    assert [without_run_id(line) for line in shown.lines] == [one | {"pinned": True}]
    assert "is a backup itself" in shown.err


def test_backup_inside_a_backup_is_refused(playgrounds: Playgrounds, root: str) -> None:
    """A prune of the outer one would remove the inner one."""
    inner = ("backup", "raw", "--pd", playgrounds["v1ttl"], "-s", f"{root}/first/deeper/inner")
    done = tikv_br(*inner, "--output", "json")
    assert (done.code, "is inside the backup" in done.last["message"]) == (30, True)


WRONG: dict[str, tuple[Callable[[str, str], tuple[str, ...]], int]] = {
    "list without a storage": (lambda _root, _id: ("list", "--output", "json"), 2),
    "list of a relative path": (lambda _root, _id: ("list", "-s", "here"), 2),
    "show of an unknown id": (lambda root, _id: ("show", "-s", root, "ffff0000"), 31),
    "show of a place without a backup": (lambda root, _id: ("show", "-s", root), 31),
    "show of an unknown view": (lambda root, one: ("show", "-s", root, one, "--view", "x"), 2),
    "cat of an absent key": (lambda root, one: ("cat", "-s", root, one, "absent"), 13),
    "cat of a key that is no hex": (lambda root, one: ("cat", "-s", root, one, "xyz", "--format", "hex"), 2),
    "cat in a keyspace of V1TTL": (lambda root, one: ("cat", "-s", root, one, "k", "--keyspace", "5"), 2),
    "pin of an unknown id": (lambda root, _id: ("backup", "pin", "-s", root, "ffff0000"), 31),
    "unpin of nothing": (lambda root, _id: ("backup", "unpin", "-s", root, ""), 31),
    "prune without a rule": (lambda root, _id: ("prune", "-s", root, "--confirm"), 2),
    "prune with a negative rule": (lambda root, _id: ("prune", "-s", root, "--keep-last", "-1", "--confirm"), 2),
    "list of an empty place": (lambda root, _id: ("list", "-s", f"{root}/none"), 31),
    "prune of an empty place": (lambda root, _id: ("prune", "-s", f"{root}/none", "--keep-last", "1"), 31),
    "prune of a backup": (lambda root, _id: ("prune", "-s", f"{root}/first", "--keep-last", "1"), 2),
    "list where nothing answers": (lambda _root, _id: ("list", "-s", "s3://bkt/p?endpoint=http://127.0.0.1:1"), 21),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_has_its_exit_code(root: str, case: str) -> None:
    """Each refusal has the exit code of its class, names it in JSON, and changes nothing."""
    make, code = WRONG[case]
    before = ids(root)
    done = tikv_br(*make(root, before[0]), "--output", "json")
    assert done.code == code, done.out + done.err
    assert json.loads(done.out.splitlines()[-1])["code"] == code
    assert ids(root) == before
