"""The key file of the status server."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tikv_br.errors import StorageReadOnly, UsageError
from tikv_br.web.address import load_or_create_key, read_key


def test_concurrent_creators_get_one_private_key(tmp_path: Path) -> None:
    """All threads get the same key, its file has mode 600, and no temporary file is left."""
    path = tmp_path / "new" / "status.key"
    with ThreadPoolExecutor(16) as pool:
        keys = {key.reveal() for key in pool.map(load_or_create_key, [path] * 64)}
    [key] = keys
    assert re.fullmatch(r"[\w-]{43}", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_keys_are_random(tmp_path: Path) -> None:
    """Two files get two keys."""
    assert load_or_create_key(tmp_path / "a") != load_or_create_key(tmp_path / "b")


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """The hint is the command that fixes it."""
    path = tmp_path / "status.key"
    load_or_create_key(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="is readable by other users") as caught:
        load_or_create_key(path)
    assert caught.value.hint == f"Run: chmod 600 {path}"


def test_a_key_that_another_user_has_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know it; and a pipe of theirs would be waited for."""
    path = tmp_path / "status.key"
    load_or_create_key(path)
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    else:
        os.chown(path, 4242, -1)
    with pytest.raises(UsageError, match="is no file of this user"):
        load_or_create_key(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is no file of this user"):
        load_or_create_key(tmp_path / "pipe")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"fifteen-letters", b"sixteen letters!!", b"k\xc3\xa9y-of-sixteen-bytes"]
)
def test_invalid_keys_are_refused(tmp_path: Path, content: bytes) -> None:
    """Keys that are empty, short, or not printable ASCII without spaces."""
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="does not contain a valid status key"):
        read_key(path)


def test_surrounding_white_space_is_ignored(tmp_path: Path) -> None:
    """Editors and `echo` add a newline."""
    path = tmp_path / "key"
    path.write_bytes(b" sixteen-letters!\r\n")
    assert read_key(path).reveal() == "sixteen-letters!"


def test_missing_and_unwritable_files_are_errors(tmp_path: Path) -> None:
    """A file given by the user does not exist; the parent of our own file is not a directory."""
    with pytest.raises(UsageError, match="does not exist"):
        read_key(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(StorageReadOnly):
        load_or_create_key(tmp_path / "file" / "status.key")
