"""Hooks of scheduled commands: who is notified of which end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.listener import Listener, listening
from tikv_br.cli import main
from tikv_br.cli.shared import CommandFlags, FailureHookFlags, HookFlags
from tikv_br.errors import BackupNotFound, Failure, Terminated, TikvBrError, UsageError


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Run a listener."""
    with listening() as server:
        yield server


def run(hooks: FailureHookFlags, failure: Failure | None = None, **summary: object) -> None:
    """A command with hooks that ends so."""
    flags = CommandFlags()
    with contextlib.suppress(Failure), hooks.around("backup raw", flags):
        flags.out.result("summary", summary)
        if failure is not None:
            raise failure


def figures(path: Path) -> dict[str, float]:
    """The samples of a textfile."""
    families = text_string_to_metric_families(path.read_text())
    found = [each for family in families for each in family.samples]
    assert {each.labels["command"] for each in found} == {"backup raw"}
    return {each.name.removeprefix("tikv_br_command_"): each.value for each in found}


def test_a_success_and_then_a_failure(listener: Listener, tmp_path: Path) -> None:
    """The heartbeat is requested after the success only; the textfile still has the time of the last success."""
    prom = tmp_path / "backup.prom"
    hooks = HookFlags(heartbeat_url=listener.url("beat").reveal(), textfile=str(prom))
    run(hooks, total_kvs=12, total_bytes=340)
    first = figures(prom)
    assert (first["success"], first["exit_code"], first["kvs"], first["bytes"]) == (1, 0, 12, 340)
    assert first["last_success_timestamp_seconds"] == first["end_timestamp_seconds"]
    run(hooks, BackupNotFound("there is none"))
    second = figures(prom)
    assert (second["success"], second["exit_code"]) == (0, BackupNotFound.exit_code)
    assert second["last_success_timestamp_seconds"] == first["end_timestamp_seconds"] < second["end_timestamp_seconds"]
    assert [(method, path) for method, path, _ in listener.heard] == [("GET", "/beat")]


def test_a_failure_runs_the_command_with_what_failed(tmp_path: Path) -> None:
    """Message and hint are in its environment without secrets; a signal is a failure of a backup, and the end of a daemon."""
    seen = tmp_path / "seen.json"
    script = f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"
    command = f'{sys.executable} -c "{script}"'
    run(HookFlags(on_failure=command))
    assert not seen.exists()
    run(HookFlags(on_failure=command), TikvBrError("s3://ak:s3cr3t@bucket is away\n\x1b[2J", hint="Wait."))
    told = json.loads(seen.read_text())
    assert told["TIKV_BR_HOOK_MESSAGE"].endswith(r"is away\n\x1b[2J")
    assert (told["TIKV_BR_HOOK_COMMAND"], told["TIKV_BR_HOOK_EXIT_CODE"]) == ("backup raw", "1")
    assert told["TIKV_BR_HOOK_HINT"] == "Wait."
    assert "s3cr3t" not in told["TIKV_BR_HOOK_MESSAGE"]
    seen.unlink()
    run(FailureHookFlags(on_failure=command), Terminated("terminated"))
    assert not seen.exists()
    run(HookFlags(on_failure=command), Terminated("terminated"))
    assert json.loads(seen.read_text())["TIKV_BR_HOOK_EXIT_CODE"] == "143"


def test_hooks_that_cannot_work_are_refused_before_the_command(tmp_path: Path) -> None:
    """A folder that does not exist, and words without an end."""
    for hooks in (HookFlags(textfile=str(tmp_path / "gone" / "x.prom")), HookFlags(on_failure="mail 'x")):
        with pytest.raises(UsageError), hooks.around("prune", CommandFlags()):
            pytest.fail("the command has started")


def test_a_broken_hook_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The command's own end counts; the problem is a warning. A file of another tool is replaced."""
    prom = tmp_path / "x.prom"
    prom.write_text("{ no metrics\n")
    run(HookFlags(heartbeat_url="http://127.0.0.1:1/secret", textfile=str(prom)))
    assert figures(prom)["success"] == 1
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "secret" not in caplog.text


def test_scheduled_commands_have_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the program: a `prune` of a place without backups fails, and the command is run."""
    seen = tmp_path / "failed"
    arguments = ["prune", "-s", str(tmp_path / "none"), "--keep-last", "1", "--on-failure", f"touch {seen}"]
    assert main.run(arguments) != 0
    assert seen.exists()
    capsys.readouterr()
    for path in ("backup raw", "backup txn", "backup merge", "prune", "verify", "log compact", "gc run", "drill run"):
        assert main.run([*path.split(), "--help-all"]) == 0
        assert "--on-failure" in capsys.readouterr().out
