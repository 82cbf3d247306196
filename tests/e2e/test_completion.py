"""Suggestions for a shell when the user presses the tab key."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment
from tikv_br.backupset.index import ENTRIES


def answer(**variables: str) -> str:
    """Return what the program says to a shell that asks by environment variables, which is no error."""
    done = subprocess.run(
        [str(PROGRAM)], capture_output=True, text=True, check=True, timeout=60, env=environment(**variables)
    )
    assert done.stderr == ""
    return done.stdout


def complete(line: str, shell: str = "bash", **more: str) -> list[str]:
    """Return what a shell gets for the end of a line: in bash bare words, in the others with their help."""
    words = line.split(" ")
    protocol = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    said = answer(**protocol, _TIKV_BR_COMPLETE=f"complete_{shell}", **more)
    return [found for found in said.splitlines() if found]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tikv-br ba", ["backup"]),
        ("tikv-br raw del", ["delete", "delete-range"]),
        ("tikv-br backup raw --eng", ["--engine"]),
        ("tikv-br backup raw --engine s", ["store", "scan"]),
        ("tikv-br backup raw --dst-api-version ", ["v1", "v1ttl", "v2"]),
        ("tikv-br restore --mo", ["--mode"]),
        ("tikv-br show --view ", ["summary", "ranges", "files"]),
        ("tikv-br list --output ", ["console", "json"]),
        ("tikv-br list --log-f", ["--log-file", "--log-format"]),
        ("tikv-br config show back", ["backup"]),
        ("tikv-br config show backup ", ["raw"]),
    ],
)
def test_commands_flags_and_values(line: str, words: list[str]) -> None:
    """Each word of the command line is completed with what may stand there."""
    found = complete(line)
    assert set(words) <= set(found)
    assert all(word.startswith(line.rsplit(" ", 1)[-1]) for word in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_words_with_their_help(shell: str) -> None:
    """The protocols of zsh and fish carry a line of help for each word."""
    [found] = [line for line in complete("tikv-br backup unp", shell) if "unpin" in line]
    assert "Allow prune to remove a pinned backup again." in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_the_shells(shell: str) -> None:
    """The script to source calls the program by the protocol that is tested here."""
    assert f"_TIKV_BR_COMPLETE=complete_{shell}" in answer(_TIKV_BR_COMPLETE=f"source_{shell}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder whose index has three entries, which completion lists without reading them."""
    folder = tmp_path / "root"
    (folder / ENTRIES).mkdir(parents=True)
    for name in ("20260101", "20260102", "beef"):
        (folder / ENTRIES / f"{name}.json").touch()
    return folder


def test_ids_of_backups(root: Path, tmp_path: Path) -> None:
    """Ids come from the index at --storage, whether flag, variable or config file says where that is."""
    both = ["20260101", "20260102"]
    assert complete(f"tikv-br show --storage {root} 2026") == both
    assert complete("tikv-br pin 2026", TIKV_BR_STORAGE=str(root)) == both
    config = tmp_path / "config.toml"
    config.write_text(f'[defaults]\nstorage = "{root}"\n')
    assert complete("tikv-br cat 2026", TIKV_BR_CONFIG=str(config)) == both
    assert complete("tikv-br unpin ", TIKV_BR_CONFIG=str(config)) == [*both, "beef"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TIKV_BR_STORAGE": "/nowhere"},
        {"TIKV_BR_STORAGE": "ftp://nonsense"},
        {"TIKV_BR_CONFIG": "/nowhere"},
        {"TIKV_BR_CONFIG": "/etc/passwd"},
    ],
)
def test_ids_that_cannot_be_had_are_none(variables: dict[str, str]) -> None:
    """Whatever is wrong with the settings, the shell gets no words and no message."""
    assert complete("tikv-br pin ", **variables) == []
