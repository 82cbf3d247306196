"""Twin of tikv_br/playground/home.py and settings.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tikv_br.errors import PlaygroundError
from tikv_br.playground.home import Home, open_own, registered_homes
from tikv_br.playground.settings import Settings, TlsSettings

HOLD = (
    "import sys, fcntl; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own playgrounds out of sight."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_lock_is_another_process_s(tmp_path: Path) -> None:
    """While another process holds the lock the folder counts as running and cannot be locked; its end frees it."""
    home = Home(tmp_path / "playground")
    assert not home.is_running()
    with home.locked():
        pass
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.directory / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert home.is_running()
        with pytest.raises(PlaygroundError, match="already"), home.locked():
            pass
        holder.kill()
    assert not home.is_running()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    """A path with a file in the way is refused with the system's reason."""
    (tmp_path / "file").touch()
    with pytest.raises(PlaygroundError, match="Not a directory"), Home(tmp_path / "file" / "playground").locked():
        pass


def test_state_is_whole_or_not_there(tmp_path: Path) -> None:
    """The state is written in one piece and can be cleared; no other file stays behind."""
    home = Home(tmp_path)
    assert home.state() is None
    home.write_state({"pid": os.getpid()})
    assert home.state() == {"pid": os.getpid()}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    home.clear_state()
    assert home.state() is None


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_state_is_said(tmp_path: Path, text: str) -> None:
    """A state that no server has written ends the command that asks for it by its name; a file in the way means none."""
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(PlaygroundError, match=r"state\.json"):
        Home(tmp_path).state()
    assert Home(tmp_path / "state.json").state() is None


def test_a_damaged_entry_falls_off_the_list(tmp_path: Path) -> None:
    """It names nothing, and hides nothing."""
    home = Home(tmp_path / "kept")
    home.directory.mkdir()
    home.register()
    entries = next((tmp_path / "state").rglob("*.json")).parent
    for number, text in enumerate(("", "[]", "{}")):
        (entries / f"{number}.json").write_text(text)
    assert [each.directory for each in registered_homes()] == [home.directory]
    assert len(list(entries.iterdir())) == 1
    home.unregister()


def test_the_list_forgets_folders_that_are_gone(tmp_path: Path) -> None:
    """Registered folders are listed; one that was removed by hand falls off the list."""
    kept, gone = Home(tmp_path / "kept"), Home(tmp_path / "gone")
    for home in (kept, gone):
        home.directory.mkdir()
        home.register()
    gone.directory.rmdir()
    assert [home.directory for home in registered_homes()] == [kept.directory]
    kept.unregister()
    assert registered_homes() == []
    assert list((tmp_path / "state").rglob("*.json")) == []


def test_settings_survive_json() -> None:
    """Settings with TLS are read back as they were; fields of another version are left out."""
    settings = Settings("/d", api_version=2, stores=5, tls=TlsSettings("ca", "cert", "key", mutual=True))
    assert Settings.from_json(settings.to_json()) == settings
    newer = {**json.loads(Settings("/d").to_json()), "of_the_future": 1}
    assert Settings.from_json(json.dumps(newer)) == Settings("/d")


@pytest.mark.parametrize(("stores", "replicas", "voters"), [(1, 0, 1), (2, 0, 2), (5, 0, 3), (5, 2, 2)])
def test_default_replicas(stores: int, replicas: int, voters: int) -> None:
    """Three voters where there are stores enough, else as many as stores; a number given counts."""
    assert Settings("/d", stores=stores, replicas=replicas).voters == voters


@pytest.mark.parametrize("name", ["lock", "playground.log", "state.json"])
def test_links_in_a_directory_change_no_file(tmp_path: Path, name: str) -> None:
    """Another user may have put a link into a directory that all may write to: its target is not truncated, nor appended to."""
    victim = tmp_path / "victim"
    victim.write_text("of another")
    home = Home(tmp_path / "playground")
    home.directory.mkdir()
    (home.directory / name).symlink_to(victim)
    with contextlib.suppress(PlaygroundError), home.locked():
        home.write_state({"pid": 1})
    with contextlib.suppress(OSError):
        os.write(open_own(home.log), b"x")
    assert victim.read_text() == "of another"


def test_a_pipe_as_lock_is_refused(tmp_path: Path) -> None:
    """Opening it must not wait for a reader."""
    home = Home(tmp_path)
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(PlaygroundError, match="is not a regular file"), home.locked():
        pass
