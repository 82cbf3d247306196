"""The config file and the variables: which value holds, where it is from, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tikv_br.cli.backup_cmd import RawBackupFlags
from tikv_br.cli.command import build, leaves
from tikv_br.cli.main import app, run
from tikv_br.cli.settings import options, variables

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return where a test may write its file."""
    return tmp_path / "config.toml"


def show(capsys: Capture, *arguments: str) -> dict[str, tuple[Any, str]]:
    """Return value and origin of each setting of ``config show``, by name."""
    assert run(["config", "show", "--output", "json", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: (line["value"], line["origin"]) for line in lines}


def refusal(capsys: Capture, *arguments: str) -> str:
    """Return the output of a command that ends with exit code 2."""
    assert run(arguments) == 2
    return capsys.readouterr().err


def test_flag_goes_before_variable_before_section_before_defaults(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same setting from five origins: taking one away lets the next one hold."""
    command = ("backup", "raw", "--config", str(config))
    config.write_text("[defaults]\nconcurrency = 2\n[backup.raw]\nconcurrency = 3\n[restore.raw]\nconcurrency = 9\n")
    monkeypatch.setenv("TIKV_BR_CONCURRENCY", "4")
    assert show(capsys, *command, "--concurrency", "5")["concurrency"] == ("5", "flag")
    assert show(capsys, *command)["concurrency"] == ("4", "env TIKV_BR_CONCURRENCY")
    monkeypatch.delenv("TIKV_BR_CONCURRENCY")
    assert show(capsys, *command)["concurrency"] == (3, f"file {config} [backup.raw]")
    config.write_text("[defaults]\nconcurrency = 2\n")
    assert show(capsys, *command)["concurrency"] == (2, f"file {config} [defaults]")
    config.write_text("")
    assert show(capsys, *command)["concurrency"] == (None, "default")


def test_every_flag_has_a_variable_of_its_own(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared flags have one for all commands, others one that names the command."""
    monkeypatch.setenv("TIKV_BR_BACKUP_RAW_GCTTL", "9m")
    monkeypatch.setenv("TIKV_BR_S3_FORCE_PATH_STYLE", "true")
    found = show(capsys, "backup", "raw")
    assert found["gc-ttl"] == ("9m", "env TIKV_BR_BACKUP_RAW_GCTTL")
    assert found["s3.force-path-style"] == ("true", "env TIKV_BR_S3_FORCE_PATH_STYLE")
    assert show(capsys, "list")["s3.force-path-style"][1] == "env TIKV_BR_S3_FORCE_PATH_STYLE"


@pytest.mark.parametrize(
    ("flags", "variable", "text"),
    [
        (["--pd", "a:1", "--pd", "b:2"], "", ""),
        ([], "a:1 b:2", ""),
        ([], "", '[defaults]\npd = ["a:1", "b:2"]\n'),
    ],
    ids=["flags", "variable", "file"],
)
def test_lists_come_from_every_origin(
    flags: list[str], variable: str, text: str, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several PD addresses are kept, from any origin."""
    config.write_text(text)
    monkeypatch.setenv("TIKV_BR_PD", variable)
    assert show(capsys, "raw", "get", "--config", str(config), *flags)["pd"][0] == ["a:1", "b:2"]


def test_commands_take_what_the_file_says(config: Path, tmp_path: Path, capsys: Capture) -> None:
    """A required flag may stand in the file, and so may the form of output, for results and for failures."""
    config.write_text(f'[defaults]\nstorage = "{tmp_path}"\noutput = "json"\n')
    assert run(["show", "--config", str(config)]) == 31
    assert json.loads(capsys.readouterr().out)["name"] == "BackupNotFound"


def test_the_users_own_file_is_found(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --config it is tikv-br/config.toml of the user's configuration folder, and TIKV_BR_CONFIG goes before it."""
    own, other = tmp_path / "tikv-br" / "config.toml", tmp_path / "other.toml"
    own.parent.mkdir()
    own.write_text('[list]\nstorage = "/own"\n')
    other.write_text('[list]\nstorage = "/other"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert show(capsys, "list")["storage"] == ("/own", f"file {own} [list]")
    monkeypatch.setenv("TIKV_BR_CONFIG", str(other))
    assert show(capsys, "list")["storage"] == ("/other", f"file {other} [list]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[backup.raw]\ngctl = '1m'\n", ["[backup.raw]", "unknown key 'gctl'", "did you mean gcttl?"]),
        ("[backup.row]\n", ["unknown section 'backup.row'", "did you mean backup.raw?"]),
        ("[default]\n", ["unknown section 'default'", "did you mean defaults?"]),
        ("pd = 'a:1'\n", ["unknown key outside of a section 'pd'"]),
        ("[backup]\nraw = 1\n", ["[backup]", "use [backup.raw]"]),
        ("[defaults]\ngcttl = '1m'\n", ["[defaults]", "unknown key 'gcttl'"]),
        ("[backup.raw]\ngcttl = 60\n", ["[backup.raw]", "gcttl", "60 is not a string"]),
        ("[backup.raw]\nchecksum = 'yes'\n", ["'yes' is not true or false"]),
        ("[backup.raw]\nconcurrency = true\n", ["True is not a whole number"]),
        ("[backup.raw]\nconcurrency = 0\n", ["concurrency", "greater than or equal to 1"]),
        ("[defaults]\noutput = 'xml'\n", ["[defaults]", "output", "'xml'", "json"]),
        ("[defaults]\npd = [1]\n", ["[1] is not a list of strings"]),
        ("[prune]\nconfirm = true\n", ["[prune]", "confirm: can only be passed on the command line"]),
        ("[restore.raw]\nallow-overwrite = true\n", ["can only be passed on the command line"]),
        (
            "[defaults]\nstorage = 's3://bkt?secret-access-key=HUSH'\n",
            ["storage: secrets are not allowed here", "TIKV_BR_STORAGE"],
        ),
        ("[defaults\n", ["line 1"]),
        ("[list]\nstorage = 1\n[show]\nviev = ''\n", ["[list]", "[show]", "did you mean view?"]),
    ],
)
def test_mistakes_are_refused_with_file_section_and_nearest_name(
    text: str, words: list[str], config: Path, capsys: Capture
) -> None:
    """Every command refuses a file with a mistake anywhere, and says where and what was probably meant."""
    config.write_text(text)
    said = refusal(capsys, "version", "--config", str(config))
    assert str(config) in said
    assert all(word in said for word in words), said
    assert "HUSH" not in said


def test_missing_file_is_refused_and_help_needs_none(config: Path, capsys: Capture) -> None:
    """A file that is named must be there; --help answers whatever its state."""
    assert "No such file" in refusal(capsys, "version", "--config", str(config))
    config.write_text("[nonsense]")
    assert run(["list", "--help", "--config", str(config)]) == 0


def test_check_tells_all_mistakes_of_file_and_environment(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each: a wrong key, a wrong value, a variable that nobody reads, one with a wrong value."""
    config.write_text("[list]\nstorag = ''\n[raw.scan]\nlimit = -1\n")
    monkeypatch.setenv("TIKV_BR_STORGE", "/x")
    monkeypatch.setenv("TIKV_BR_CONCURRENCY", "many")
    assert run(["config", "check", "--config", str(config), "--output", "json"]) == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    messages = [line["message"] for line in lines if line["message_type"] == "problem"]
    assert len(messages) == 4
    assert lines[-1]["message"] == "4 mistakes in the settings, shown above"
    for word in ("did you mean storage?", "[raw.scan]", "did you mean TIKV_BR_STORAGE?", "TIKV_BR_CONCURRENCY='many'"):
        assert any(word in message for message in messages), word
    config.write_text("[list]\nstorage = '/x'\n")
    monkeypatch.delenv("TIKV_BR_STORGE")
    monkeypatch.delenv("TIKV_BR_CONCURRENCY")
    assert run(["config", "check", "--config", str(config)]) == 0
    assert "1 settings, no mistakes" in capsys.readouterr().out


def test_show_masks_secrets(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential in a variable is used, and never shown."""
    monkeypatch.setenv("TIKV_BR_STORAGE", "s3://bkt/p?secret-access-key=HUSH&region=eu")
    for arguments in (["config", "show", "list"], ["config", "show"], ["config", "show", "--output", "json"]):
        assert run(arguments) == 0
        out = capsys.readouterr().out
        assert "HUSH" not in out
        assert "secret-access-key=***&region=eu" in out


def test_old_spellings_work_and_are_not_shown(config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flag, variable and config key; help has one spelling."""
    command = ("backup", "raw", "--config", str(config))
    config.write_text("[backup.raw]\ngcttl = '7m'\n")
    assert show(capsys, *command)["gc-ttl"] == ("7m", f"file {config} [backup.raw]")
    monkeypatch.setenv("TIKV_BR_BACKUP_RAW_GCTTL", "8m")
    assert show(capsys, *command)["gc-ttl"] == ("8m", "env TIKV_BR_BACKUP_RAW_GCTTL")
    assert show(capsys, *command, "--gcttl", "9m")["gc-ttl"] == ("9m", "flag")
    for words, old in (
        (["backup", "raw"], "gcttl"),
        (["prune"], "--confirm"),
        (["sync"], "--start-key"),
        (["restore", "raw"], "--restore-ts"),
        (["restore", "point"], "--restored-ts"),
        (["drill", "run"], "--restore-ts"),
        (["kafka", "replay"], "--until-ts"),
        (["log", "status"], "--id "),
        (["log", "start"], "--id "),
        (["raw"], "load"),
    ):
        assert run([*words, "--help-all"]) == 0
        assert old not in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("command", "old", "present"),
    [
        ("restore raw", "restore-ts", "until"),
        ("restore point", "restored-ts", "until"),
        ("drill run", "restore-ts", "until"),
        ("kafka replay", "until-ts", "until"),
        *((f"log {word}", "id", "log-id") for word in ("start", "status", "metadata", "pause", "stop", "truncate")),
        ("raw load", "count", "count"),
    ],
)
def test_renamed_flags_work_as_before(
    command: str, old: str, present: str, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old name is a flag, a variable and a key of the config file."""
    words = (*command.split(), "--config", str(config))
    config.write_text(f"[{command.replace(' ', '.')}]\n{old} = {7 if old == 'count' else repr('7')}\n")
    assert str(show(capsys, *words)[present][0]) == "7"
    monkeypatch.setenv(f"TIKV_BR_{command}_{old}".upper().replace(" ", "_").replace("-", "_"), "8")
    assert str(show(capsys, *words)[present][0]) == "8"
    assert str(show(capsys, *words, f"--{old}", "9")[present][0]) == "9"


def test_show_knows_the_commands(capsys: Capture) -> None:
    """`restore` is `restore raw`; what is no command gets the nearest name."""
    assert show(capsys, "restore", "--storage", "/x")["storage"] == ("/x", "flag")
    assert "did you mean" in refusal(capsys, "config", "show", "prun")
    assert "No such option: --nonsense" in refusal(capsys, "config", "show", "list", "--nonsense")


def test_every_command_takes_what_all_take() -> None:
    """Config file, logs and a variable for each flag, that no other flag of the command has; values to choose from are known."""
    for path, command in leaves(typer.main.get_command(app)):
        flags = options(command)
        assert {"log-level", "log-file", "log-format"} <= flags.keys(), path
        names = [name for option in dict.fromkeys(flags.values()) for name in variables(option)]
        assert all(name.startswith("TIKV_BR_") for name in names), path
        assert len(set(names)) == len(names) == len(flags), path
        listed = [
            flag for flag, option in flags.items() if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", option.metavar or "")
        ]
        assert listed == [], f"{path}: say Literal[...], which is checked and completed"


def test_home_directory_in_paths(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` stands for the home directory in every path, from wherever it comes: no shell expands it in files, variables and behind ``=``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("zz")
    (tmp_path / "config.toml").write_text('[defaults]\n"crypter.key-file" = "~/key"\n')
    monkeypatch.setenv("TIKV_BR_STORAGE", "~/backups")
    assert run(["list", "--config=~/config.toml", "--log-file=~/log"]) == 2
    assert f"{tmp_path}/key" in capsys.readouterr().err + (tmp_path / "log").read_text()
    (tmp_path / "config.toml").write_text("")
    assert run(["list", "--config=~/config.toml"]) == 31
    assert f"local://{tmp_path}/backups" in capsys.readouterr().err
    assert run(["list", "local://~/others"]) == 31
    assert f"local://{tmp_path}/others" in capsys.readouterr().err
    for name, keys in {"gcs.credentials-file": "", "s3.ca": "&region=r&access-key=a&secret-access-key=b"}.items():
        url = f"{name.partition('.')[0]}://bucket/p?endpoint=https://127.0.0.1:9{keys}"
        assert run(["list", f"--storage={url}", f"--{name}=~/missing"]) != 0
        assert f"{tmp_path}/missing" in capsys.readouterr().err
    assert run(["list", "--storage=gcs://bucket/p?endpoint=http://127.0.0.1:9&credentials-file=~/absent"]) == 21
    assert f"{tmp_path}/absent" in capsys.readouterr().err


def test_placeholders_of_paths() -> None:
    """Flags whose placeholder is a file, a directory or a URL expand ``~``; others leave it, as keys may begin with it."""

    class Values(dict[str, Any]):
        def __missing__(self, name: str) -> str:
            return "~/x"

    flags = build(RawBackupFlags, Values())
    s3, home = flags.storage_flags.s3, str(Path("~/x").expanduser())
    assert {s3.ca, flags.storage, flags.cluster.ca, flags.cluster.key, s3.gcs.credentials_file} == {home}
    assert {s3.region, s3.sse} == {"~/x"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_config_file_of_another_system(end: str, config: Path, capsys: Capture) -> None:
    """A byte order mark and other line ends are as Windows and old editors write them."""
    config.write_bytes(b"\xef\xbb\xbf" + f"[defaults]{end}concurrency = 7{end}".encode())
    assert show(capsys, "backup", "raw", "--config", str(config))["concurrency"][0] == 7
    config.write_bytes("[defaults]\n".encode("utf-16"))
    assert "is not in UTF-8" in refusal(capsys, "config", "check", "--config", str(config))
