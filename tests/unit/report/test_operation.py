"""Reports of single commands: written as a whole, of hostile texts nothing acts, and each check belongs to a step that there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tikv_br.backup import run
from tikv_br.backup.run import backup_steps
from tikv_br.cli.output import reporting
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.diff.run import COMPARISON
from tikv_br.errors import Interrupted, StorageUnreachable, TikvBrError, UsageError
from tikv_br.progress_events import Notice, StepStarted, silent
from tikv_br.redaction import visible_lines
from tikv_br.report.operation import CHECKS, ReportFile
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore_steps, txn_restore_steps
from tikv_br.storage.url import parse
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify_steps

HOSTILE = "</title><script>document.title='owned'</script><img src=x onerror=alert(1)>\" onload=\"x \u202egnp.exe \x00\x1b[31m\ud800 {{7*7}}"


def fail(report: Path, error: BaseException) -> None:
    """Run a command that fails in its second step."""
    with reporting("verify", str(report)) as draft:
        listener = draft.listen(silent)
        listener(StepStarted("read the backup", 1, 2))
        listener(Notice(HOSTILE))
        draft.found(HOSTILE, HOSTILE)
        raise error


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [
        (StorageUnreachable("gone", hint="Look for it."), "failed", 20),
        (Interrupted("interrupted"), "interrupted", 130),
        (KeyboardInterrupt(), "interrupted", 130),
        (ZeroDivisionError("oh"), "failed", 1),
    ],
)
def test_a_failure_of_any_kind_is_reported_and_goes_on(
    error: BaseException, verdict: str, code: int, tmp_path: Path
) -> None:
    """The error comes up as it was, and the report has its exit code and step."""
    with pytest.raises(type(error)):
        fail(tmp_path / "x.json", error)
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["verdict"], found["exit_code"], found["trouble"]["exit_code"]) == (verdict, code, code)
    assert found["trouble"]["step"] == "read the backup"
    assert found["compared"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "command", ["backup raw", "backup txn", "restore raw", "restore point", "restore txn", "verify", "diff"]
)
def test_every_command_with_a_report_has_its_sentences(command: str, tmp_path: Path) -> None:
    """The page of a command that passes and of one that fails."""
    with reporting(command, str(tmp_path / "passed.html")):
        pass
    with pytest.raises(StorageUnreachable), reporting(command, str(tmp_path / "failed.html")):
        raise StorageUnreachable("gone")
    failed_page = (tmp_path / "failed.html").read_text()
    assert [each for each in ("Figures", "Timeline", "Throughput", "Comparisons") if f"<h2>{each}" in failed_page] == []
    for name in ("passed", "failed"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["verdict"] == name


def test_hostile_texts_are_inert(tmp_path: Path) -> None:
    """Markup is text; controls, direction marks and halves of pairs are escapes; the JSON still reads."""
    with pytest.raises(TikvBrError):
        fail(tmp_path / "x.html", TikvBrError(HOSTILE, hint=f"{HOSTILE} --webhook-url https://hooks/s3cret"))
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img" not in page
    assert '" onload' not in page
    assert "\u202e" not in page
    assert "\x00" not in page
    assert r"\u202egnp.exe \x00\x1b[31m\ud800 {{7*7}}" in page
    both = page + (tmp_path / "x.json").read_text()
    assert "s3cret" not in both
    assert json.loads((tmp_path / "x.json").read_text())["notices"] == [HOSTILE]
    assert visible_lines("schlüssel-鍵\n\t👍") == "schlüssel-鍵\n\t👍"


def test_a_report_replaces_another_and_leaves_nothing_else(tmp_path: Path) -> None:
    """No temporary file is left; the JSON of a page stands beside it."""
    for _ in range(2):
        with reporting("diff", str(tmp_path / "x.html")):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json"]


def test_a_report_that_cannot_be_written_is_an_error_only_where_nothing_else_is(tmp_path: Path) -> None:
    """After success it has the code of the storage's error; after a failure that failure stays."""
    report = tmp_path / "folder" / "x.html"
    for error, expected in ((None, 1), (StorageUnreachable("gone"), 20)):
        report.parent.mkdir()
        with pytest.raises(TikvBrError) as caught, reporting("diff", str(report)):  # noqa: PT012 - the block is what is tested
            report.parent.rmdir()
            report.parent.write_text("a file now")
            if error is not None:
                raise error
        report.parent.unlink()
        assert (caught.value.exit_code == 20) == (expected == 20)


@pytest.mark.parametrize("name", ["x.pdf", "x", "gone/x.html", "folder.html"])
def test_a_file_that_cannot_be_a_report_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ending, no folder, or a folder of that name."""
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--report"):
        ReportFile.at(name)
    with pytest.raises(UsageError), reporting("verify", name):
        pytest.fail("the command was run")


def test_each_check_belongs_to_a_step_of_its_runbook() -> None:
    """A step that is renamed takes its line of the report with it."""
    cluster, place = ClusterConfig(pd=("127.0.0.1:1",)), parse("/somewhere")
    backup = {step.name for step in backup_steps(BackupOptions(cluster=cluster, storage=place, checksum=True))}
    verify = {step.name for level in Level for step in verify_steps(VerifyOptions(place, level, cluster))}
    assert CHECKS["backup raw"].keys() <= backup
    transactional = run.txn_backup_steps(BackupOptions(cluster=cluster, storage=place, checksum=True))
    assert CHECKS["backup txn"].keys() <= {step.name for step in transactional}
    assert CHECKS["restore raw"].keys() <= {step.name for step in restore_steps(RestoreOptions(cluster, place))}
    restored = txn_restore_steps(RestoreOptions(cluster, place))
    assert CHECKS["restore txn"].keys() <= {step.name for step in restored}
    assert CHECKS["verify"].keys() <= verify
    assert CHECKS["diff"].keys() <= {step.name for step in COMPARISON}
