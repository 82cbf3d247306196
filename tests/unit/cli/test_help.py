"""Help: what matters first, in groups, and everything on request; one source for help, man pages and the config file."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperOption

from scripts.generate_man import pages
from tikv_br.cli import help as help_text
from tikv_br.cli.command import GLOBAL_FLAGS, CommandPath, leaves
from tikv_br.cli.main import Commands, app, run
from tikv_br.cli.settings import is_shared, options

COMMANDS = {path: command for path, command in leaves(typer.main.get_command(app)) if not command.hidden}
MOST_OPTIONS = 18
Capture = pytest.CaptureFixture[str]


KEY_FILE = "--crypter.key-file"
"""The only option of storage that is shown at once."""


def output(capsys: Capture, *words: str) -> str:
    """Output of a command that succeeds."""
    capsys.readouterr()
    assert run(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    """The options that a help text lists."""
    options = text[min(text.index(f"\n{panel}:\n") for panel in help_text.PANELS if f"\n{panel}:\n" in text) :]
    return set(re.findall(r"^  (?:-\w, )?(--[\w.-]+)", options, re.MULTILINE)) - {"--help", "--help-all"}


def shown_flags(path: CommandPath) -> set[str]:
    """The options of a command that were not removed, by their first long name."""
    found = [param for param in COMMANDS[path].params if isinstance(param, TyperOption) and param.help]
    return {next(name for name in param.opts if name.startswith("--")) for param in found}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_the_options_that_matter_and_help_all_shows_all(path: CommandPath, capsys: Capture) -> None:
    """At most eighteen, in groups, without variables, TLS files and storage; then every one, with its variable."""
    short, full = output(capsys, *path, "--help"), output(capsys, *path, "--help-all")
    assert len(flags_in(short)) <= MOST_OPTIONS, flags_in(short)
    assert flags_in(full) == shown_flags(path)
    assert flags_in(short) <= flags_in(full)
    assert "env var" not in short
    assert not {flag for flag in flags_in(short) if "." in flag or flag.startswith(("--spark", "--log-l"))} - {KEY_FILE}
    titles = re.findall(r"^(\w[\w ]*):$", full, re.MULTILINE)
    assert [title for title in titles if title not in help_text.PANELS] == []
    assert titles == [panel for panel in help_text.PANELS if panel in titles]
    for param in COMMANDS[path].params:
        if isinstance(param, TyperOption) and param.help and param.envvar:
            name = param.envvar if isinstance(param.envvar, str) else param.envvar[0]
            assert name in re.sub(r"\s", "", full), name
    left_out = len(flags_in(full) - flags_in(short))
    said = " ".join(short.split())
    assert f"--help-all shows {left_out} more options" in said
    assert ("help storage" in said) == any("--s3." in flag for flag in flags_in(full))


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("backup raw", "--heartbeat-url --on-failure --keyspace --prefix --checksum --crypter.key-file"),
        ("prune", "--heartbeat-url --on-failure"),
        ("verify", "--heartbeat-url --on-failure --prefix --to-keyspace --crypter.key-file"),
        ("drill run", "--heartbeat-url --on-failure"),
        ("gc run", "--on-failure"),
        ("log compact", "--heartbeat-url --on-failure --log-id"),
        ("restore raw", "--log-id --to-keyspace --prefix --checksum --crypter.key-file"),
        ("restore point", "--log-id --to-keyspace --prefix --checksum --crypter.key-file"),
        ("restore txn", "--to-keyspace --prefix --checksum --crypter.key-file"),
        ("backup merge", "--log-id"),
        ("load raw", "--csv-encoding --bad-rows"),
        ("export raw", "--prefix --crypter.key-file"),
        ("diff", "--prefix --crypter.key-file"),
        *(
            (path, "--crypter.key-file")
            for path in ("list", "show", "cat", "prune", "log start", "log changes", "sync", "serve")
        ),
    ],
)
def test_short_help_has_what_operators_look_for(capsys: Capture, path: str, wanted: str) -> None:
    """Also the flags of scheduled commands, and of logs beside others."""
    assert set(wanted.split()) <= flags_in(output(capsys, *path.split(), "--help"))


def test_help_names_its_topics(capsys: Capture) -> None:
    """Those that `help` has besides commands."""
    assert "tikv-br help storage" in " ".join(output(capsys, "--help").split())


def test_help_of_transactional_data_is_about_them(capsys: Capture) -> None:
    """The short help has the option that a restore from API V1 into V2 needs, and none names operations on raw data only."""
    assert "--to-keyspace" in flags_in(output(capsys, "restore", "txn", "--help"))
    assert "--base" not in output(capsys, "backup", "txn", "--help-all")


@pytest.mark.parametrize("table", [help_text._ADVANCED, help_text._SHOWN], ids=["advanced", "shown"])
def test_tables_of_help_name_options_that_exist(table: dict[str, str]) -> None:
    """A renamed option is not left behind."""
    for words, patterns in table.items():
        paths = [path for path in COMMANDS if f"{' '.join(path)} ".startswith(f"{words} " if words else "")]
        names = {flag[2:] for path in paths for flag in shown_flags(path)}
        odd = [pattern for pattern in patterns.split() if not any(help_text._fits(name, pattern) for name in names)]
        assert odd == [], words


def test_commands_are_grouped_by_purpose(capsys: Capture) -> None:
    """Protect, Recover, Replicate, Inspect, Operate, Try; each with whole sentences; --help-all adds those of groups."""
    short, full = output(capsys, "--help"), output(capsys, "--help-all")
    titles = ["Protect", "Recover", "Replicate", "Inspect", "Operate", "Try"]
    assert re.findall(r"^(\w+):$", short, re.MULTILINE)[1:] == titles
    assert "..." not in short.partition("Protect:")[2]
    for name, lazy in Commands.table.items():
        assert (f"\n  {name} " in short) == bool(lazy.panel)
    for path in COMMANDS:
        assert f"\n  {' '.join(path)} " in full


def test_help_command_shows_commands_and_topics(capsys: Capture) -> None:
    """`help CMD` is `CMD --help`; alone it is the list of commands; `help storage` has what --help leaves out."""
    for words in (["restore", "raw"], ["log"], ["list"], []):
        assert output(capsys, "help", *words) == output(capsys, *words, "--help")
    storage = output(capsys, "help", "storage")
    assert {"--s3.endpoint", "--crypter.key-file", "--storage-patience"} <= set(re.findall(r"--[\w.-]+", storage))
    assert "TIKV_BR_S3_ENDPOINT" in storage
    assert run(["help", "restor"]) == 2
    assert "Did you mean 'restore'" in capsys.readouterr().err
    assert run(["help", "list", "raw"]) == 2
    assert "tikv-br list has no command 'raw'" in capsys.readouterr().err


def test_help_all_of_a_group_with_a_default_command_is_that_of_the_command(capsys: Capture) -> None:
    """``restore --help-all`` is ``restore raw --help-all``; after ``--`` it is an argument."""
    assert output(capsys, "restore", "--help-all") == output(capsys, "restore", "raw", "--help-all")
    assert run(["raw", "put", "--format", "hex", "--", "--help-all", "v"]) == 2
    assert "KEY" in capsys.readouterr().err


def test_flags_of_all_commands_may_stand_before_the_command(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every spelling; they win over variables and the config file, and one behind the command wins over them."""
    monkeypatch.setenv("TIKV_BR_OUTPUT", "json")
    assert '"version"' in output(capsys, "version")
    assert '"version"' not in output(capsys, "--output", "console", "version")
    monkeypatch.delenv("TIKV_BR_OUTPUT")
    for words in (["--output", "json", "version"], ["--output=json", "-q", "version"]):
        assert '"message_type":"version"' in output(capsys, *words)
    assert '"message_type"' not in output(capsys, "--output", "json", "version", "--output", "console")
    config = tmp_path / "config.toml"
    config.write_text("[list]\nstorage = '/one'\n")
    assert "/one" in output(capsys, "--config", str(config), "config", "show")
    assert run(["--log-level", "nonsense", "restore", "-s", "/nowhere"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert run(["--output"]) == 2
    assert run(["--pd", "1.2.3.4:1", "list"]) == 2


def test_every_flag_of_all_commands_may_stand_before_them() -> None:
    """The list is that of `CommandFlags`."""
    of_all = {name for param in COMMANDS["version",].params for name in param.opts}
    assert set(GLOBAL_FLAGS) == of_all


def test_man_pages_have_the_help_of_every_command() -> None:
    """A page each, with all options, and one that lists them."""
    found = dict(pages())
    assert found.keys() == {f"{'-'.join(('tikv-br', *path))}.1" for path in COMMANDS} | {"tikv-br.1"}
    for path in COMMANDS:
        text = found[f"{'-'.join(('tikv-br', *path))}.1"].replace("\\-", "-")
        assert shown_flags(path) <= set(re.findall(r"--[\w.-]*\w", text))
        assert {".SH NAME", ".SH SYNOPSIS", ".SH EXAMPLE"} <= set(text.splitlines())
        assert "-".join(("tikv-br", *path)) in found["tikv-br.1"].replace("\\-", "-")


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_man_pages_have_no_mistakes() -> None:
    """Groff formats each without a warning of an unknown request."""
    text = "\n".join(text for _name, text in pages())
    command = ["groff", "-man", "-wmac", "-Wbreak", "-Kutf8", "-Tutf8"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""


def test_config_init_writes_every_setting_as_a_comment(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes nothing; with every comment removed it is valid, and has every setting but secrets."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "tikv-br" / "config.toml"
    assert str(path) in output(capsys, "config", "init")
    assert "0 settings, no mistakes" in output(capsys, "config", "check")
    text = path.read_text(encoding="utf-8")
    assert output(capsys, "config", "init", "-") == text
    assert run(["config", "init"]) == 2
    assert f"{path} exists" in capsys.readouterr().err
    path.write_text(re.sub(r"^# (?=[\w.-]+ = )", "", text, flags=re.MULTILINE), encoding="utf-8")
    assert "no mistakes" in output(capsys, "config", "check")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    assert document["defaults"]["s3"]["endpoint"] == ""
    for command_path, command in COMMANDS.items():
        section = document
        for word in command_path:
            section = section.get(word, {})
        own = {option for option in options(command).values() if option.help and not is_shared(option)}
        missing = [option.opts for option in own if not {name.lstrip("-") for name in option.opts} & section.keys()]
        assert all("url" in str(names) or "token" in str(names) for names in missing), missing
