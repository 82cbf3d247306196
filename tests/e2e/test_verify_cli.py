"""Verify as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.documented import checked
from tests.support.program import run_program


def tikv_br(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line without a terminal."""
    done = run_program(["verify", *arguments], environment=os.environ)
    return checked(["verify", *arguments], done)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON lines."""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def damaged(golden: Path, tmp_path: Path) -> tuple[Path, set[str]]:
    """A real backup with one file missing and one altered, and their names."""
    target = tmp_path / "backup"
    shutil.copytree(golden / "backups" / "v2" / "data", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    missing, altered = sorted(target.rglob("*.sst"))[:2]
    missing.unlink()
    altered.write_bytes(altered.read_bytes()[:-1] + b"x")
    return target, {str(path.relative_to(target)) for path in (missing, altered)}


@pytest.mark.core("verify")
def test_a_sound_backup_ends_with_a_summary(golden: Path) -> None:
    """Exit code 0, progress in between, and the last line has the checks."""
    done = tikv_br(f"local://{golden / 'backups' / 'v2' / 'data'}", "--output", "json")
    last = lines(done)[-1]
    assert (done.returncode, done.stderr) == (0, "")
    assert last["message_type"] == "summary"
    assert (last["level"], last["files"], last["files_checked"]) == ("files", 18, 18)
    assert last["storage"] == f"local://{golden / 'backups' / 'v2' / 'data'}"
    assert any(line["message_type"] == "progress" for line in lines(done))


def test_the_location_may_be_a_flag(golden: Path) -> None:
    """``-s URL`` is the same as the argument; the console's summary shows the subset, too."""
    done = tikv_br("-s", f"local://{golden / 'backups' / 'v2' / 'data'}", "--subset", "10%", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert "2 of 18, 10% with seed 5" in done.stdout
    assert f"storage            local://{golden / 'backups' / 'v2' / 'data'}" in done.stdout


def test_every_finding_is_a_json_line(damaged: tuple[Path, set[str]]) -> None:
    """Each has object, cause and level; then the error follows, with their number and code 32."""
    folder, names = damaged
    done = tikv_br(f"local://{folder}", "--output", "json")
    found = [line for line in lines(done) if line["message_type"] == "finding"]
    last = lines(done)[-1]
    assert done.returncode == 32
    assert {line["object"] for line in found} == names
    assert {line["level"] for line in found} == {"meta", "files"}
    assert all(line["cause"] and line.keys() >= {"message_type", "object", "cause", "level"} for line in found)
    assert (last["message_type"], last["code"], last["name"]) == ("exit_error", 32, "BackupDamaged")
    assert last["message"].startswith("2 findings")


def test_a_backupmeta_that_somebody_else_wrote(tmp_path: Path) -> None:
    """It is the finding; who made the backup is not known, so nothing else is missed."""
    (tmp_path / "backupmeta").write_bytes(b"id: 7\nkind: something else\n")
    done = tikv_br(f"local://{tmp_path}", "--output", "json")
    assert done.returncode == 32
    assert [line["object"] for line in lines(done) if line["message_type"] == "finding"] == ["backupmeta"]
    assert "tikv-br made" not in done.stdout


def test_several_backups(golden: Path, damaged: tuple[Path, set[str]], tmp_path: Path) -> None:
    """By URLs, or by ids below ``--storage``; those after a damaged one are verified, too, and each line names its backup."""
    sound, (bad, names) = str(golden / "backups" / "v2" / "data"), damaged
    done = tikv_br(str(bad), sound, str(tmp_path / "none"), "--output", "json")
    found = lines(done)
    assert {line["object"] for line in found if line["message_type"] == "finding"} == names
    assert {line["storage"] for line in found if line["message_type"] == "finding"} == {f"local://{bad}"}
    assert [line["storage"] for line in found if line["message_type"] == "summary"] == [f"local://{sound}"]
    assert (done.returncode, found[-1]["name"]) == (32, "BackupDamaged")
    assert found[-1]["message"].startswith("2 of 3 backups: 2 findings")
    assert f"WARNING {tmp_path / 'none'}: " in re.sub(r"\[\w+\] ", "", done.stderr)
    run_program(["list", str(tmp_path), "--rebuild"], environment=os.environ)
    shutil.copytree(sound, tmp_path / "second")
    listed = run_program(["list", str(tmp_path), "--rebuild", "--output", "json"], environment=os.environ)
    ids = [line["id"] for line in lines(listed) if line["message_type"] == "backup"]
    assert len(ids) == 2
    assert tikv_br("--storage", str(tmp_path), *ids).stderr.count("backups: 2 findings") == 1
    assert tikv_br(sound, sound, "--report", str(tmp_path / "report.json")).returncode == 2


def test_people_get_a_table_of_findings(damaged: tuple[Path, set[str]]) -> None:
    """The table stands on stdout, the error on stderr, and nowhere is there a word of success."""
    folder, names = damaged
    done = tikv_br(f"local://{folder}")
    assert done.returncode == 32
    assert "Findings" in done.stdout
    assert all(name in done.stdout for name in names)
    assert "Verified" not in done.stdout
    assert "2 findings" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["/tmp/a", "-s", "/tmp/b"], 2),
        (["/tmp/a", "--level", "deep"], 2),
        (["/tmp/a", "--executor", "cloud"], 2),
        (["/tmp/a", "--subset", "lots"], 2),
        (["/tmp/a", "--level", "meta", "--subset", "10%"], 2),
        (["/tmp/a", "--executor", "spark", "--spark-master", "nonsense"], 2),
        (["/nonexistent/backup"], 31),
    ],
)
def test_wrong_input_has_its_own_code(arguments: list[str], code: int) -> None:
    """Impossible requests are refused with a message and a hint."""
    done = tikv_br(*arguments)
    assert done.returncode == code
    assert "Error: " in done.stderr
    assert "Hint: " in done.stderr
    assert done.stdout == ""
