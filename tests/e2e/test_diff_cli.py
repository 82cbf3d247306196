"""``tikv-br diff`` as a user runs it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.e2e.conftest import Playgrounds


def at_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Run a command that asks a question on a terminal, and answer; returns exit code and what stood there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(PROGRAM), *arguments], stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, env=environment(), cwd="/"
    ) as process:
        os.close(theirs)
        try:
            reported = _conversation(ours, answer.encode() + b"\n")
            return process.wait(60), reported.decode()
        finally:
            process.kill()  # of no effect on one that has ended
            os.close(ours)


def _conversation(terminal: int, answer: bytes) -> bytes:
    """All that a program writes until it ends, or is silent for too long; its question is answered once."""
    reported, asked = b"", False
    while select.select([terminal], [], [], 120)[0]:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how a terminal without a program at its other end reads
            break
        reported += part
        if b"[y/N]" in reported and not asked:
            asked = True
            os.write(terminal, answer)
    return reported


@pytest.fixture
def pair(playgrounds: Playgrounds, tmp_path: Path) -> tuple[str, str]:
    """A V1 and a V2 cluster: equal, but for three keys, whatever another test has repaired."""
    a, b = playgrounds["v1"], playgrounds["v2"]
    succeed("raw", "delete", "--pd", b, "lost")
    common = "key,value\nsame,1\nequal,2\n"
    for pd, own in ((a, "both,here\nlost,value\n"), (b, "both,there\nextra,value\n")):
        (tmp_path / "rows.csv").write_text(common + own)
        succeed("raw", "import", str(tmp_path / "rows.csv"), "--pd", pd)
    return a, b


def test_differences_are_told_and_have_their_exit_code(pair: tuple[str, str]) -> None:
    """A JSON line each range and key, a summary that adds up, and code 60; nothing is written."""
    a, b = pair
    done = tikv_br("diff", "--pd", a, "--other-pd", b, "--output", "json")
    assert done.code == 60, done.out + done.err
    keys = {bytes.fromhex(line["key"]): line["kind"] for line in done.lines if line["message_type"] == "different_key"}
    ranges = [line for line in done.lines if line["message_type"] == "different_range"]
    [summary] = [line for line in done.lines if line["message_type"] == "summary"]
    assert keys == {b"lost": "only_a", b"extra": "only_b", b"both": "value"}
    assert sum(line["only_a"] + line["only_b"] + line["value"] for line in ranges) == summary["remaining"] == 3
    assert (summary["api_version"], summary["other_api_version"]) == ("v1", "v2")
    assert (done.last["name"], done.last["message"]) == ("DifferencesFound", "3 keys differ")


@pytest.mark.core("diff")
def test_people_get_tables(pair: tuple[str, str]) -> None:
    """Keys in the form asked for; two --pd are two clusters; --keys limits what is named, not what is counted."""
    a, b = pair
    done = tikv_br("diff", "--pd", a, "--pd", b, "--keys", "1", "--format", "hex")
    assert done.code == 60
    assert b"both".hex() in done.out
    assert b"lost".hex() not in done.out
    assert "the first 1, 2 more" in done.out
    assert "only in A" in done.out
    assert "3 keys differ" in done.err
    quiet = tikv_br("diff", "--pd", a, "--pd", b, "-q")
    assert quiet.code == 60
    assert "only in A" in quiet.out
    assert "compared" not in quiet.out


def test_a_repair_of_missing_rows_only(pair: tuple[str, str]) -> None:
    """B gets what only A has; what is otherwise there, or only there, stays as it is."""
    a, b = pair
    sides = ("--pd", a, "--other-pd", b)
    code, reported = at_a_terminal("no", "diff", *sides, "--repair", "--repair-missing")
    assert (code, "Write 1 to B?" in reported) == (60, True)
    done = tikv_br("diff", *sides, "--repair", "--repair-missing", "--yes")
    assert (done.code, "2 keys differ" in done.err) == (60, True)
    values = [succeed("raw", "get", "--pd", b, key).out.strip() for key in ("lost", "both", "extra")]
    assert values == ["value", "there", "value"]


def test_a_repair(pair: tuple[str, str]) -> None:
    """Not without --yes where nobody can be asked; then only what A has is written; then what is extra goes; then equal."""
    a, b = pair
    sides = ("--pd", a, "--other-pd", b)
    refused = tikv_br("diff", *sides, "--repair")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert "with `--repair-delete` it also deletes" in tikv_br("diff", *sides).err
    code, reported = at_a_terminal("no", "diff", *sides, "--repair")
    assert code == 60
    assert "3 keys differ. Write 2 to B?" in reported
    assert tikv_br("raw", "get", "--pd", b, "lost").code == 13
    code, reported = at_a_terminal("yes", "diff", *sides, "--repair")
    assert code == 60
    assert "--repair-delete" in reported
    assert succeed("raw", "get", "--pd", b, "lost").out.strip() == "value"
    assert "`--repair --repair-delete` deletes" in tikv_br("diff", *sides).err
    repaired = succeed("diff", *sides, "--repair", "--repair-delete", "--yes")
    assert "Equal" in repaired.out
    assert succeed("diff", *sides, "-q").out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pd", "127.0.0.1:1"),
        ("--pd", "127.0.0.1:1", "--other-pd", "127.0.0.1:2", "--storage", "/tmp/x"),
        ("--pd", "127.0.0.1:1", "--other-pd", "127.0.0.1:2", "--executor", "cloud"),
        ("--pd", "127.0.0.1:1", "--other-pd", "127.0.0.1:2", "--repair-delete"),
        ("--pd", "127.0.0.1:1", "--other-pd", "127.0.0.1:2", "--start", "b", "--end", "a"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...]) -> None:
    """Refused before any cluster is looked for."""
    done = tikv_br("diff", *arguments)
    assert done.code == 2
    assert "Hint: " in done.err
