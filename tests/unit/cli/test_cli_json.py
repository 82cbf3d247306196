"""docs/cli-json.md describes the output of commands; every e2e test checks real output (tests/support/documented.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documented import assert_documented, tables

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "generate_cli_json.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("generate_cli_json", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["generate_cli_json"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fields_without_meaning_and_meanings_without_field_are_told(generator: ModuleType) -> None:
    """A new field needs a line in the glossary, and one that has gone must leave it."""
    with pytest.raises(generator.NotSeen, match=r"'crc64xor'.*'nonsense'"):
        generator.page("", {name: "" for name in all_fields(generator) if name != "crc64xor"} | {"nonsense": ""})


def all_fields(generator: ModuleType) -> set[str]:
    """Return the fields of all messages."""
    commands = [*generator.schema().values(), generator.progress_schema()]
    return {name for messages in commands for fields in messages.values() for name in fields} | set(
        generator.failure_fields()
    )


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ('out.result("m", {"a": 1, **more})', ["a", "b"]),
        ('out.result("m", helper())', ["c", "d"]),
        ('out.result("m", {"a": 1, **picked(out, "e", "f")})', ["a", "e", "f"]),
        ('out.result("m", {"a": 1} | helper())', ["a", "c", "d"]),
        ('note = lambda each: out.result("m", {"a": each} if each else more)', ["a", "b"]),
    ],
)
def test_fields_are_read_off_the_source(
    body: str, fields: list[str], generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Literals, names, unions and functions that return them are seen through."""
    module = f"sample_{len(body)}_cmd"
    (tmp_path / f"{module}.py").write_text(
        f"def helper():\n    return {{'c': 1, 'd': 2}}\n\n\ndef command(out):\n    more = {{'b': 1}}\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    [(place, call)] = list(generator._results(module, "command", set()))
    assert generator._message(place, call)[1] == fields


def test_fields_made_at_run_time_are_refused(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that static analysis cannot see are refused with the line, instead of being left out of the page."""
    (tmp_path / "hidden_cmd.py").write_text('def command(out, fields):\n    out.result("m", {**fields})\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    [(place, call)] = list(generator._results("hidden_cmd", "command", set()))
    with pytest.raises(generator.NotSeen, match=r"hidden_cmd, line 2.*fields"):
        generator._message(place, call)


def test_the_judge_refuses_what_the_page_does_not_name() -> None:
    """Unknown types, unknown fields, a missing version: each fails the command that wrote it."""
    head = {"message_type": "put", "schema_version": 2, "run_id": ""}
    assert_documented(["raw", "put", "k", "v"], [{**head, "key": "6b"}])
    assert ("raw put", "put") in tables()
    for line in ({**head, "kee": "6b"}, {**head, "message_type": "pot"}, {"message_type": "put", "key": "6b"}):
        with pytest.raises(AssertionError):
            assert_documented(["raw", "put", "k", "v"], [line])
