"""The file with the status server's key."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from incremental.watch.key import own_key, read_key
from tikv_br.errors import StorageReadOnly, UsageError


def test_it_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    """However many begin at once, all have the same key, in a file of mode 600, and nothing else is left."""
    path = tmp_path / "new" / "status.key"
    with ThreadPoolExecutor(16) as pool:
        keys = {key.reveal() for key in pool.map(own_key, [path] * 64)}
    [key] = keys
    assert re.fullmatch(r"[\w-]{43}", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_another_place_has_another_key(tmp_path: Path) -> None:
    """It is drawn, not derived."""
    assert own_key(tmp_path / "a") != own_key(tmp_path / "b")


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """The hint is the command that mends it."""
    path = tmp_path / "status.key"
    own_key(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others may read") as caught:
        own_key(path)
    assert caught.value.hint == f"Say: chmod 600 {path}"


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"fifteen-letters", b"sixteen letters!!", b"k\xc3\xa9y-of-sixteen-bytes"]
)
def test_what_is_no_key(tmp_path: Path, content: bytes) -> None:
    """Empty, short, with spaces within or beyond ASCII: no HTTP header carries that, or everyone guesses it."""
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no key"):
        read_key(path)


def test_white_space_around_it_does_not_count(tmp_path: Path) -> None:
    """As editors and `echo` leave it."""
    path = tmp_path / "key"
    path.write_bytes(b" sixteen-letters!\r\n")
    assert read_key(path).reveal() == "sixteen-letters!"


def test_a_place_that_cannot_be_had(tmp_path: Path) -> None:
    """A missing file of the user's, and a folder that is a file, are said."""
    with pytest.raises(UsageError, match="there is no file"):
        read_key(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(StorageReadOnly):
        own_key(tmp_path / "file" / "status.key")
