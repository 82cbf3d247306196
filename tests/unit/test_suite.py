"""Rules of the test suite: core tests of every feature, and test modules that are no libraries for each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.tools import ROOT
from tikv_br.cli.main import Commands

FEATURE_OF_COMMAND = {
    "abort": "resume",
    "backup": "backup",
    "capture": "changefeed",
    "cat": "index",
    "changefeed": "changefeed",
    "check": "check",
    "delete": "index",
    "diff": "diff",
    "drill": "drill",
    "export": "export",
    "find": "index",
    "gc": "gc",
    "kafka": "sync",
    "list": "index",
    "load": "load",
    "log": "sync",
    "pin": "index",
    "playground": "playground",
    "processor": "changefeed",
    "prune": "index",
    "raw": "raw",
    "restore": "restore",
    "serve": "serve",
    "show": "index",
    "sync": "sync",
    "unlock": "resume",
    "unpin": "index",
    "verify": "verify",
}
WITHOUT_SERVERS = {"config", "help", "spark", "version"}
"""Unit tests are enough for these commands."""
BESIDE_COMMANDS = {"encryption", "parquet", "report", "s3", "spark", "tls"}
"""Features that are options of several commands."""


def core_features(tier: str) -> Iterator[str]:
    """Yield the features that ``pytest.mark.core`` names in a tier."""
    for path in (ROOT / "tests" / tier).rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.core":
                yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_feature_has_a_core_test_of_each_tier() -> None:
    """Only the playground's commands are run by an integration test alone."""
    features = {*FEATURE_OF_COMMAND.values(), *BESIDE_COMMANDS}
    assert set(core_features("integration")) == features
    assert set(core_features("e2e")) == features - {"playground"}


def test_every_command_belongs_to_a_feature() -> None:
    """A new command is put under a feature, and so gets core tests."""
    assert set(FEATURE_OF_COMMAND) | WITHOUT_SERVERS == set(Commands.table)


def imported_modules(source: str) -> Iterator[str]:
    """Everything that a module may import as a module; names inside of modules, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def test_no_module_imports_a_test_module() -> None:
    """Code shared by test modules is in tests/support or in a module beside them."""
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        found = [name for name in imported_modules(path.read_text()) if modules & set(name.split("."))]
        assert not found, f"{path.relative_to(ROOT)} imports {found}: move what it needs to tests/support"
