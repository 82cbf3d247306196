"""The entry point: every failure has its form and its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import typer.main

from tikv_br.backupset.lease import Lease, LeaseOwner
from tikv_br.cli import main, shared
from tikv_br.cli.main import Commands, run, wants_json
from tikv_br.errors import LeaseHeld, StorageDenied


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let ``tikv-br version`` raise."""

    def raise_it(_output: object) -> None:
        raise error

    monkeypatch.setattr(shared, "Output", raise_it)


def test_version_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag and the command say the version; JSON is one object."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tikv-br 1.")
    assert run(["version", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["message_type"] == "version"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["rw"], "Did you mean 'raw'"),
        (["backup", "rwa", "--storage", "/b"], "Did you mean 'raw'"),
        (["restore", "tnx", "--storage", "/b"], "Did you mean 'txn'"),
        (["restore", "piont"], "Did you mean 'point'"),
        (["version", "--nonsense"], "No such option: --nonsense"),
        (["version", "--output", "xml"], "xml"),
        (["raw", "put", "k"], "VALUE"),
    ],
)
def test_usage_errors_exit_2_with_the_way_to_help(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is on stderr, with a pointer to the help."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "--help" in err


@pytest.mark.parametrize(
    "arguments", [["version", "--nonsense", "--output", "json"], ["version", "--output=json", "--nonsense"]]
)
def test_usage_errors_are_json_when_asked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script that asked for JSON gets one `exit_error` line on stdout, though the command line did not parse."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert err == ""
    line = json.loads(out)
    assert (line["message_type"], line["code"], line["name"]) == ("exit_error", 2, "UsageError")


def test_our_error_gives_its_code_message_and_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Class decides the code; secrets in a message are blanked in both forms."""
    failing(monkeypatch, StorageDenied("no access to s3://bkt?secret-access-key=HIDDEN", hint="ask"))
    assert run(["version"]) == 21
    assert capsys.readouterr().err == "Error: no access to s3://bkt?secret-access-key=***\nHint: ask\n"
    assert run(["version", "--output", "json"]) == 21
    line = json.loads(capsys.readouterr().out)
    assert (line["code"], line["name"], line["hint"]) == (21, "StorageDenied", "ask")
    assert "HIDDEN" not in line["message"]


def test_a_hint_is_whole_where_the_message_ends_with_the_name_of_a_credential(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Redaction of credentials leaves the hint alone."""
    failing(monkeypatch, StorageDenied("wrong is --etcd-password", hint="do this"))
    assert run(["version"]) == 21
    assert capsys.readouterr().err == "Error: wrong is --etcd-password\nHint: do this\n"


def test_unexpected_error_exits_1_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect is one line with its class, and a hint how to see more."""
    failing(monkeypatch, ZeroDivisionError("by zero"))
    assert run(["version"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "Error: unexpected ZeroDivisionError: by zero\nHint: Run the command again with --log-level debug"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_interruption_exits_130(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, in whatever form it comes up, is 130."""
    failing(monkeypatch, error)
    assert run(["version"]) == 130


def test_the_bare_command_shows_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The bare command explains itself, and is not a success for a script."""
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Protect:" in err


def test_json_wish_is_seen_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both spellings of the flag and the variable count; what follows ``--`` does not, and the flag wins."""
    assert wants_json(["raw", "get", "--output", "json"])
    assert wants_json(["--output=json"])
    assert not wants_json(["raw", "get", "--", "--output=json"])
    monkeypatch.setenv("TIKV_BR_OUTPUT", "json")
    assert wants_json([])
    assert not wants_json(["--output", "console"])


@pytest.mark.parametrize("name", list(Commands.table))
def test_listed_help_is_the_command_s_own(name: str) -> None:
    """The line in the list, written without importing the command, is the first line of the command's own help."""
    lazy = Commands.table[name]
    assert (lazy.load(name).help or "").splitlines()[0] == lazy.help


def test_commands_offer_no_completion_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the root installs completion."""
    assert run(["version", "--help"]) == 0
    assert "completion" not in capsys.readouterr().out
    assert main.PROGRAM == "tikv-br"


def test_default_command_of_a_group_need_not_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``restore --nonsense`` is ``restore raw --nonsense``, and ``restore --help`` is still the group's."""
    assert run(["restore", "--nonsense"]) == 2
    assert "tikv-br restore raw --help" in capsys.readouterr().err
    assert run(["restore", "--help"]) == 0
    assert "raw" in capsys.readouterr().out


HOSTILE = "host\n\x1b]0;title\x07\x1b[2J\u202eError: all is well\r\u2028"
ESCAPED = r"host\n\x1b]0;title\x07\x1b[2J\u202eError: all is well\r\u2028"


def test_no_control_character_of_a_record_reaches_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Names of hosts and paths come from files that others may have written: message, hint, log file and JSON have escapes."""
    owner = LeaseOwner(HOSTILE, "m", 1, 1)
    failing(monkeypatch, LeaseHeld(f"in use: {Lease('t', owner, HOSTILE, HOSTILE, 1)}", hint=HOSTILE))
    assert run(["version", "--log-file", str(tmp_path / "log")]) == LeaseHeld.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == ["Error", "Hint"]
    assert f"process 1 on {ESCAPED}" in err
    written = (tmp_path / "log").read_text()
    assert len(written.splitlines()) == 1
    for text in (err, written):
        assert text.replace("\n", "").isprintable()
    assert run(["version", "--output", "json"]) == LeaseHeld.exit_code
    line = capsys.readouterr().out
    assert line.removesuffix("\n").isprintable()


@pytest.mark.parametrize(
    ("former", "more", "now"),
    [
        ("pin", "x --storage /nowhere", "backup pin"),
        ("unpin", "x --storage /nowhere", "backup unpin"),
        ("delete", "x --storage /nowhere", "backup delete"),
        ("abort", "--storage /nowhere", "backup abort"),
        ("unlock", "--storage /nowhere", "backup unlock"),
        ("find", "key --storage /nowhere", "backup find"),
        ("capture list", "--pd 127.0.0.1:1 --etcd nothing:x", "changefeed captures"),
        ("processor list", "--pd 127.0.0.1:1 --etcd nothing:x", "changefeed processors"),
        ("capture start", "--pd 127.0.0.1:1 --etcd nothing:x", "changefeed capture"),
        ("log stop", "--pd 127.0.0.1:1 --storage /nowhere --yes", "log end"),
    ],
)
def test_a_former_name_says_the_present_one(
    former: str, more: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It works once more, with a warning, and no help lists it."""
    run([*former.split(), *more.split()])
    assert f"`tikv-br {former}` is now `tikv-br {now}`" in capsys.readouterr().err
    run(["log", "--help"] if former.startswith("log ") else ["--help"])
    assert (
        f"\n  {former.rsplit(maxsplit=1)[-1] if former.startswith('log ') else former.split(maxsplit=1)[0]} "
        not in capsys.readouterr().out
    )
