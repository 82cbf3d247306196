"""The error tree: with codes of their own, and able to travel."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tikv_br.cluster.channel import FailedUnknown
from tikv_br.errors import Failure
from tikv_br.redaction import redact

ROOT = Path(__file__).resolve().parents[2]


def subclasses(base: type[Failure]) -> list[type[Failure]]:
    """Return ``base`` and all below it that the package defines."""
    own = [child for child in base.__subclasses__() if child.__module__ == "tikv_br.errors"]
    return [base, *(error for child in own for error in subclasses(child))]


ALL = [error for error in subclasses(Failure) if hasattr(error, "exit_code")]


def test_a_failure_goes_by_a_name_that_is_documented() -> None:
    """An error of a package's own is reported by its documented base class."""
    assert FailedUnknown("odd").to_json()["name"] == FailedUnknown("odd").name == "RequestRefused"


def test_exit_codes_are_distinct_and_fit_a_shell() -> None:
    """No two causes share a code, and none collides with success or with what a shell uses."""
    codes = [error.exit_code for error in ALL if "exit_code" in vars(error)]
    assert len(codes) == len(set(codes))
    assert all(0 < code < 256 and code not in {126, 127} for code in codes)


@pytest.mark.parametrize("error_class", ALL, ids=lambda error: error.__name__)
def test_error_survives_pickling_and_says_what_to_do(error_class: type[Failure]) -> None:
    """Class, message and hint come back from pickle, the JSON form has them, and every class has a doc and a hint."""
    error = pickle.loads(pickle.dumps(error_class("what", hint="do this")))
    assert (type(error), error.message, error.hint, str(error)) == (error_class, "what", "do this", "what")
    assert json.loads(json.dumps(error.to_json())) == {
        "message_type": "exit_error",
        "code": error_class.exit_code,
        "name": error_class.__name__,
        "message": "what",
        "hint": "do this",
    }
    assert error_class.__doc__
    assert error_class("x").hint


def test_documented_exit_codes_are_current() -> None:
    """docs/exit-codes.md is what the generator makes of the classes now."""
    command = [sys.executable, str(ROOT / "scripts" / "generate_exit_codes.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.endswith("current\n")


def test_every_class_with_a_code_is_documented() -> None:
    """The table has one row for each class that errors are raised as."""
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    for error in ALL:
        if "exit_code" in vars(error):
            assert f"| {error.exit_code} | `{error.__name__}` |" in page


END = " (exit code 2)"
"""Possible suffix of a message."""


def test_messages_are_not_redacted_as_secrets() -> None:
    """Redaction must not blank words of a message or hint that names flags."""
    blanked = []
    for path in (path for package in ("tikv_br", "incremental") for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documents]
        blanked += [
            (path.name, each)
            for each in said
            if isinstance(each, str) and " " in each and redact(each + END) != each + END
        ]
    assert not blanked
