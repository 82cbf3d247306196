"""What a process gets from its surroundings: folders, variables of others, limits."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.support.tools import ROOT
from tikv_br import __version__
from tikv_br.cli.main import app
from tikv_br.cli.output import failure_of
from tikv_br.environment import (
    CONFIG,
    OPTIONAL_PACKAGES,
    STATE,
    drop_foreign_variables,
    install_hint,
    needed_user_folder,
    user_folder,
)
from tikv_br.errors import MachineUnfit, UsageError

SERVICE = {
    "TIKV_BR_SERVICE_HOST": "10.96.0.7",
    "TIKV_BR_SERVICE_PORT": "8080",
    "TIKV_BR_SERVICE_PORT_HTTP": "8080",
    "TIKV_BR_PORT": "tcp://10.96.0.7:8080",
    "TIKV_BR_PORT_8080_TCP": "tcp://10.96.0.7:8080",
    "TIKV_BR_PORT_8080_TCP_PROTO": "tcp",
    "TIKV_BR_PORT_8080_TCP_PORT": "8080",
    "TIKV_BR_PORT_8080_TCP_ADDR": "10.96.0.7",
    "TIKV_BR_SERVE_SERVICE_HOST": "10.96.0.8",
    "TIKV_BR_SERVE_PORT": "udp://10.96.0.8:53",
    "TIKV_BR_PLAYGROUND_START_PORT": "tcp://10.96.0.9:2379",
}
"""As the kubelet sets them for services named tikv-br, tikv-br-serve and tikv-br-playground-start."""


def test_variables_of_kubernetes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a service, and no setting."""
    kept = {"TIKV_BR_PD": "a:1", "TIKV_BR_PLAYGROUND_START_PORT": "2379"}
    for name, value in {**SERVICE, "TIKV_BR_PD": "a:1"}.items():
        monkeypatch.setenv(name, value)
    assert drop_foreign_variables() == []
    assert not SERVICE.keys() & os.environ.keys()
    monkeypatch.setenv("TIKV_BR_PLAYGROUND_START_PORT", "2379")
    drop_foreign_variables()
    assert {name: os.environ.get(name) for name in kept} == kept


def test_no_setting_is_taken_for_a_variable_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of every flag of every command is kept."""
    import typer.main

    from tikv_br.cli.command import leaves
    from tikv_br.cli.settings import options, variables

    names = {
        name
        for _, command in leaves(typer.main.get_command(app))
        for option in options(command).values()
        for name in variables(option)
    }
    for name in names:
        monkeypatch.setenv(name, "1")
    drop_foreign_variables()
    assert names <= os.environ.keys()


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("NUMBA_NUM_THREADS", "0", "2"),
        ("NUMBA_NUM_THREADS", "many", "16"),
        ("NUMBA_DISABLE_JIT", "1", "0"),
        ("GRPC_POLL_STRATEGY", "nonsense", "epoll1,poll"),
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "cpp", "python"),
    ],
)
def test_fatal_variables_are_ignored_and_named(
    name: str, wrong: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that would end an import is dropped with a sentence; others stay."""
    monkeypatch.setenv(name, right)
    assert drop_foreign_variables() == []
    assert os.environ[name] == right
    monkeypatch.setenv(name, wrong)
    (message,) = drop_foreign_variables()
    assert f"{name}={wrong} was ignored" in message
    assert name not in os.environ


def test_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An absolute path is taken, a relative one ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(STATE, "relative")
    assert user_folder(STATE) == tmp_path / ".local/state/tikv-br"
    monkeypatch.setenv(STATE, "/var/state")
    assert user_folder(STATE) == Path("/var/state/tikv-br")
    monkeypatch.delenv(CONFIG, raising=False)
    assert user_folder(CONFIG) == tmp_path / ".config/tikv-br"


@pytest.mark.parametrize("home", ["", "relative"])
def test_no_home_is_said_where_it_is_needed(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home has no folders; only what needs one ends."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(Path, "home", lambda: Path(home))
    monkeypatch.delenv(STATE, raising=False)
    assert user_folder(STATE) is None
    with pytest.raises(UsageError, match="no home directory") as failure:
        needed_user_folder(STATE)
    assert STATE in failure.value.hint


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open", "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory", "ulimit -v"),
        (MemoryError(), "not enough memory", "ulimit -v"),
        (RuntimeError("can't start new thread"), "no more threads", "ulimit -u"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/proc/1/cwd"),
            "/proc/1/cwd: Permission denied",
            "Check the path",
        ),
    ],
)
def test_limits_of_the_machine_have_a_sentence(error: Exception, message: str, hint: str) -> None:
    """What the kernel refuses is named, with what to change, and is not called unexpected."""
    failure = failure_of(error)
    assert (type(failure), failure.exit_code) == (MachineUnfit, 56)
    assert message in failure.message
    assert hint in failure.hint


def test_missing_folder_for_temporary_files_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system without /tmp."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(FileNotFoundError) as error:
        tempfile.gettempdir()
    assert "TMPDIR" in failure_of(error.value).hint


# ------------------------------------------------------------------------------------------------------------- packages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_optional_packages_have_the_bounds_of_the_extras() -> None:
    """A hint installs what the project would install; nothing optional is required by the slim form."""
    extras = PROJECT["optional-dependencies"]
    offered = {each for name in ("full", "aws", "playground", "kafka") for each in extras[name]}
    assert set(OPTIONAL_PACKAGES.values()) == {each for each in offered if not each.startswith("tikv-br")}
    required = {re.split(r"\W", each)[0] for each in PROJECT["dependencies"]}
    assert not required & {re.split(r"[<>=]", each)[0] for each in OPTIONAL_PACKAGES.values()}


def test_both_distributions_have_the_version_of_the_code() -> None:
    """deploy/whole requires tikv-br-core of exactly its own version."""
    whole = tomllib.loads((ROOT / "deploy/whole/pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*whole["dependencies"], *(each for extra in whole["optional-dependencies"].values() for each in extra)]
    assert whole["version"] == __version__
    assert {each.partition("==")[2] for each in required} == {__version__}
    assert {whole["name"], PROJECT["name"]} == {"tikv-br", "tikv-br-core"}


@pytest.mark.parametrize("module", ["numba", "pyspark.sql", "boto3", "confluent_kafka", "rocksdict"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(module: str) -> None:
    """With this Python, from whatever index is configured."""
    failure = failure_of(ModuleNotFoundError("no", name=module))
    assert isinstance(failure, MachineUnfit)
    assert f"{sys.executable} -m pip install" in failure.hint
    assert OPTIONAL_PACKAGES[module.partition(".")[0]] in failure.hint
    assert not isinstance(failure_of(ModuleNotFoundError("no", name="other")), MachineUnfit)


def test_the_command_is_one_of_uv_where_there_is_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in environments of ``uv tool``."""
    monkeypatch.setitem(sys.modules, "pip", None)
    assert install_hint("boto3") == f"Run: uv pip install --python {sys.executable} 'boto3>=1.34,<2'"


def test_no_hint_and_no_guide_names_a_package_that_no_index_has() -> None:
    """Until a release is on an index: what is installed is a clone, or the packages themselves."""
    files = [path for folder in ("tikv_br", "incremental", "formats") for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    wrong = re.compile(r"(pip|pipx|tool|inject)\S* install [^\n`]*(?<![/\w-])tikv-br(-core)?\b(?!/)|extra: tikv-br")
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []
