"""Encrypted backups as a user makes and reads them: the key from a file, a variable or a flag, and in no output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import Done, succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.support.openssl import KEYS
from tikv_br import errors

KEY, OTHER_KEY = KEYS["aes256-ctr"], "ab" * 32
VALUE = "a value that nobody should find"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the key, as openssl writes one."""
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def made(playgrounds: Playgrounds, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one encrypted backup of two rows."""
    root = tmp_path_factory.mktemp("root")
    succeed("raw", "put", "some key", VALUE, "--pd", playgrounds["v1"])
    succeed("raw", "put", "other key", "x", "--pd", playgrounds["v1"])
    place = ("--pd", playgrounds["v1"], "-s", str(root / "first"), "--executor", "driver")
    said = succeed("backup", "raw", *place, "--crypter.key-file", str(key_file), "--log-level", "debug")
    assert KEY not in said.out + said.err
    assert not any(VALUE.encode() in path.read_bytes() for path in root.rglob("*") if path.is_file())
    return root


def with_key(made: Path, *arguments: str, key: str = KEY) -> Done:
    """Run a command on the backup, with the key in the environment; it is never in what the command says."""
    done = tikv_br(*arguments, "-s", str(made / "first"), TIKV_BR_CRYPTER_KEY=key)
    assert not key or key not in done.out + done.err
    return done


@pytest.mark.core("encryption")
def test_every_reading_command_takes_the_key(made: Path, key_file: Path, playgrounds: Playgrounds) -> None:
    """Verify, show, cat, diff and restore with it; list names the method without it."""
    assert with_key(made, "verify", "--level", "data").code == 0
    assert "aes256-ctr" in with_key(made, "show").out
    assert with_key(made, "cat", "some key").out.rstrip("\n") == VALUE
    assert succeed("list", "-s", str(made), "--output", "json").last["encryption"] == "aes256-ctr"
    assert with_key(made, "diff", "--pd", playgrounds["v1"]).code == 0
    flags = ("--crypter.method", "AES256-CTR", "--crypter.key-file", str(key_file), "--allow-overwrite")
    restored = succeed("restore", "-s", str(made / "first"), "--pd", playgrounds["v1"], *flags, "--output", "json")
    assert restored.last["verified"]


@pytest.mark.parametrize(
    "command", [("restore", "--pd", "{pd}", "--allow-overwrite"), ("verify",), ("show",), ("cat", "some key")]
)
@pytest.mark.parametrize("key", ["", OTHER_KEY])
def test_without_the_key_nothing_reads_it(
    made: Path, playgrounds: Playgrounds, command: tuple[str, ...], key: str
) -> None:
    """Key missing or another one: exit code 35, a sentence and a hint."""
    done = with_key(made, *(part.format(pd=playgrounds["v1"]) for part in command), key=key)
    assert done.code == errors.CrypterMismatch.exit_code, done.err
    assert "encrypted" in done.err
    assert "Hint: Pass --crypter.key-file" in done.err


def test_a_rotated_key_reads_what_it_wrote(
    made: Path, key_file: Path, playgrounds: Playgrounds, tmp_path: Path
) -> None:
    """With the new key first and the old one after it, stores fetch and decrypt the files, and new backups have the new key."""
    new = tmp_path / "new"
    new.write_text(OTHER_KEY)
    new.chmod(0o600)
    keys = ("--crypter.key-file", str(new), "--crypter.key-file", str(key_file))
    first, pd = ("-s", str(made / "first")), ("--pd", playgrounds["v1"], "--executor", "driver")
    assert succeed("restore", "raw", *first, *pd, *keys, "--allow-overwrite", "--output", "json").last["verified"]
    succeed("verify", *first, "--level", "data", *keys)
    succeed("backup", "raw", "-s", str(tmp_path / "second"), *pd, *keys)
    assert succeed("cat", "some key", "-s", str(tmp_path / "second"), *keys[:2]).out.rstrip("\n") == VALUE


def test_plain_text_in_place_of_an_encrypted_backup_is_refused(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """By all that read rows or start from it, sync --from-backup included."""
    pd, place = ("--pd", playgrounds["v2"]), str(tmp_path / "plain")
    succeed("backup", "raw", *pd, "-s", place, "--executor", "driver", "--allow-empty")
    for command in (
        ("restore", "raw", *pd, "-s", place),
        ("sync", *pd, "--sink", f"local://{tmp_path}/log", "--from-backup", place),
        ("export", "raw", place, "-s", str(tmp_path / "export")),
        ("diff", *pd, "-s", place),
        ("verify", "-s", place),
        ("cat", "some key", "-s", place),
    ):
        done = tikv_br(*command, TIKV_BR_CRYPTER_KEY=KEY)
        assert done.code == errors.CrypterMismatch.exit_code, (command, done.err)


@pytest.mark.parametrize(
    "flags",
    [
        ("--crypter.key", KEY, "--crypter.method", "aes128-ctr"),
        ("--crypter.key", KEY, "--crypter.method", "rot13"),
        ("--crypter.key", KEY, "--crypter.key-file", "/dev/null"),
        ("--crypter.key", KEY[:-2]),
        ("--crypter.key-file", "/dev/null"),
        ("--crypter.key-file", "/does/not/exist"),
        ("--crypter.method", "aes128-ctr"),
    ],
)
def test_wrong_flags_are_refused_without_repeating_the_key(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Exit code 2 before a cluster is asked, in the form for people and as JSON."""
    for form in ("console", "json"):
        done = tikv_br("backup", "raw", "--pd", "127.0.0.1:1", "-s", str(tmp_path), *flags, "--output", form)
        assert done.code == errors.UsageError.exit_code, done.err
        assert KEY[:-2] not in done.out + done.err
