"""The check of tests/quarantine.toml: who passes only on a retry fails the run, unless listed and not expired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.check_quarantine import FILE, main

TEST = "tests/unit/test_x.py::test_x"


def check(folder: Path, text: str, *unsteady: str) -> int:
    """Return the exit code for a quarantine file and the tests that passed on a retry."""
    file, failed = folder / "quarantine.toml", folder / "lastfailed"
    file.write_text(text)
    failed.write_text(json.dumps(dict.fromkeys(unsteady, True)))
    return main(["--unsteady", str(failed)] if unsteady else [], file)


def entry(test: str = TEST, expires: str = "9999-12-31") -> str:
    """Return a whole entry."""
    return f'[[quarantined]]\ntest = "{test}"\nreason = "a race"\nexpires = {expires}\n'


def test_a_test_that_passes_only_on_a_retry_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the test and the remedy."""
    assert check(tmp_path, "", TEST) == 1
    said = capsys.readouterr().err
    assert f"UNSTEADY: {TEST} failed and passed on a retry (fails the run: not quarantined)" in said
    assert "Fix the race" in said


def test_a_quarantined_test_passes_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One entry covers all parameters of a test."""
    assert check(tmp_path, entry(), TEST, f"{TEST}[v2-1]") == 0
    assert capsys.readouterr().err.count("(quarantined)") == 2


def test_an_entry_with_parameters_covers_no_others(tmp_path: Path) -> None:
    """The rest of the test stays under watch."""
    assert check(tmp_path, entry(f"{TEST}[v1]"), f"{TEST}[v1]") == 0
    assert check(tmp_path, entry(f"{TEST}[v1]"), f"{TEST}[v2]") == 1


def test_an_expired_entry_fails_even_if_nothing_else_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stays in quarantine for good."""
    assert check(tmp_path, entry(expires="2026-01-31")) == 1
    assert "expired on 2026-01-31" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["test", "reason", "expires"])
def test_an_entry_without_one_of_its_fields_is_refused(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test in quarantine has a reason and an end."""
    text = "".join(line for line in entry().splitlines(keepends=True) if not line.startswith(field))
    assert check(tmp_path, text) == 1
    assert f"{field} missing" in capsys.readouterr().err


def test_the_repository_s_own_file_is_sound() -> None:
    """Every entry of tests/quarantine.toml has its fields and has not expired."""
    assert main([], FILE) == 0
