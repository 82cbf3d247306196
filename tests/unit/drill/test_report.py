from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.listener import Listener, listening
from tests.unit.drill.samples import failed, passed
from tikv_br.cli.drill_cmd import DrillHookFlags
from tikv_br.drill.report import notify
from tikv_br.errors import UsageError
from tikv_br.report.hooks import Hooks
from tikv_br.storage.crypter import SecretText

PAGE = "local:///drills/reports/one.html"


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Run a listener."""
    with listening() as server:
        yield server


def test_everybody_is_told_of_a_drill_that_passed(listener: Listener, tmp_path: Path) -> None:
    """The heartbeat is fetched, the webhook gets the figures, the textfile parses, the command has them in its environment."""
    seen, prom = tmp_path / "seen.json", tmp_path / "drill.prom"
    script = f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"
    command = (sys.executable, "-c", script)
    hooks = Hooks(listener.url("beat/secret"), listener.url("hook"), str(prom), command)
    hooks.check()
    assert notify(hooks, passed(), PAGE) == []
    assert [(method, path) for method, path, _ in listener.heard] == [("POST", "/hook"), ("GET", "/beat/secret")]
    reported = json.loads(listener.heard[0][2])
    assert (reported["verdict"], reported["exit_code"], reported["rto"], reported["keys"]) == ("passed", 0, 31.0, 1000)
    families = {family.name: family.samples[0] for family in text_string_to_metric_families(prom.read_text())}
    assert families["tikv_br_drill_success"].value == 1
    assert families["tikv_br_drill_rto_seconds"].value == 31
    ended = families["tikv_br_drill_end_timestamp_seconds"].value
    assert families["tikv_br_drill_last_success_timestamp_seconds"].value == ended
    said = json.loads(seen.read_text())
    assert reported["page"] == said["TIKV_BR_DRILL_PAGE"] == PAGE
    assert (said["TIKV_BR_DRILL_VERDICT"], said["TIKV_BR_DRILL_EXIT_CODE"], said["TIKV_BR_DRILL_RTO"]) == (
        "passed",
        "0",
        "31.0",
    )


def test_the_heart_does_not_beat_after_a_failure(listener: Listener, tmp_path: Path) -> None:
    """A failed drill is reported to the webhook and the textfile, without figures that it lacks."""
    prom = tmp_path / "drill.prom"
    hooks = Hooks(listener.url("beat"), listener.url("hook"), str(prom))
    assert notify(hooks, failed(), PAGE) == []
    assert [path for _, path, _ in listener.heard] == ["/hook"]
    assert json.loads(listener.heard[0][2])["exit_code"] == 32
    names = {family.name for family in text_string_to_metric_families(prom.read_text())}
    assert "tikv_br_drill_success" in names
    assert "tikv_br_drill_rto_seconds" not in names
    assert "tikv_br_drill_cut_over_seconds" not in names


def test_a_hook_that_fails_keeps_nothing_from_the_others(listener: Listener, tmp_path: Path) -> None:
    """Each problem is reported without its URL, which may contain a secret."""
    hooks = Hooks(
        listener.url("beat"),
        listener.url("broken/secret"),
        str(tmp_path / "gone" / "x.prom"),
        (sys.executable, "-c", "1/0"),
    )
    problems = notify(hooks, passed(), PAGE)
    assert len(problems) == 3
    assert not [problem for problem in problems if "secret" in problem]
    assert [path for _, path, _ in listener.heard] == ["/broken/secret", "/beat"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("garbage", "BadStatusLine"),
        ("silent", "timeout"),
        ("dripping", "timeout"),
        ("broken", "HTTP status 500"),
    ],
)
def test_a_server_that_misbehaves_is_a_problem_and_no_failure(
    place: str, said: str, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nonsense, silence and an endless answer are reported without the URL, and not waited for."""
    monkeypatch.setattr("tikv_br.report.hooks.PATIENCE", 0.3 if said == "timeout" else 60.0)
    problems = notify(Hooks(listener.url(f"{place}/secret"), listener.url(f"{place}/secret")), passed(), PAGE)
    assert problems == [f"the webhook failed: {said}", f"the heartbeat failed: {said}"]


def test_nobody_there_is_a_problem_and_no_failure() -> None:
    """A port where nobody listens, a host that there is not."""
    gone = Hooks(SecretText("http://127.0.0.1:1/secret"), SecretText("http://nobody.invalid/secret"))
    problems = notify(gone, passed(), PAGE)
    assert [problem.partition(" failed")[0] for problem in problems] == ["the webhook", "the heartbeat"]
    assert "secret" not in "".join(problems)


def test_urls_come_from_files_as_well(tmp_path: Path) -> None:
    """A file's URL is taken without its line end; two places for one URL, and a file that says nothing, are refused."""
    file, empty = tmp_path / "url", tmp_path / "empty"
    file.write_text("https://hooks.example.com/s3cret\n", encoding="utf-8")
    empty.write_text("\n", encoding="utf-8")
    for path in (file, empty):
        path.chmod(0o600)
    hooks = DrillHookFlags(heartbeat_url_file=str(file), webhook_url_file=str(file)).hooks()
    assert hooks.heartbeat == hooks.webhook == SecretText("https://hooks.example.com/s3cret")
    assert "s3cret" not in repr(hooks)
    for wrong in (
        DrillHookFlags(webhook_url="http://a/b", webhook_url_file=str(file)),
        DrillHookFlags(heartbeat_url_file=str(empty)),
        DrillHookFlags(heartbeat_url_file=str(tmp_path / "gone")),
    ):
        with pytest.raises(UsageError, match="-url"):
            wrong.hooks()


def test_unusable_hooks_are_refused_before_the_drill(tmp_path: Path) -> None:
    """A URL of another kind and a missing folder are usage errors."""
    for url in (
        "file:///etc/passwd",
        "http://",
        "https:///path",
        "http://[s3cret",
        "http://a/b c",
        "http://a/\r\nX: s3cret",
    ):
        with pytest.raises(UsageError, match="--webhook-url") as caught:
            Hooks(webhook=SecretText(url)).check()
        assert "s3cret" not in str(caught.value)
    with pytest.raises(UsageError, match="--textfile"):
        Hooks(textfile=str(tmp_path / "gone" / "x.prom")).check()
