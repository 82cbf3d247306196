"""The matrix has every step of every operation that changes anything: whoever adds one adds it here, or says why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.integration.crash import test_backup_steps, test_drill_steps, test_restore_steps
from tests.integration.crash.cells import cells
from tikv_br.restore.steps import restore_steps

ROOT = Path(__file__).resolve().parents[3]
LISTS = {
    ("backup/run.py", "backup_steps(options)"),
    ("restore/run.py", "restore_steps(options)"),
    ("drill/run.py", "steps"),
    ("drill/run.py", "held(_ending_steps(), alone)"),
}
"""Lists of steps that are broken, where they are run."""
NOT_BROKEN = {
    ("verify/run.py", "verify_steps(options)"): "reads only",
    ("diff/run.py", "COMPARISON"): "reads only",
    ("diff/run.py", "REPAIR"): "puts and deletes as any client does: broken off, it has done less, and is run again",
}
NO_STEPS = {"work out what would be done"}
"""Of a dry run."""
FILES = ("backup/steps.py", "restore/steps.py", "drill/steps.py", "drill/run.py")


def named(file: str) -> Iterator[str]:
    """The names of all steps that a file makes."""
    module = import_module(f"tikv_br.{file.removesuffix('.py').replace('/', '.')}")
    for node in ast.walk(ast.parse((ROOT / "tikv_br" / file).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Line":
            name = node.args[0]
            assert isinstance(name, ast.Constant | ast.Name), "a step has one name"
            yield str(name.value) if isinstance(name, ast.Constant) else getattr(module, name.id)


def run_somewhere() -> Iterator[tuple[str, str]]:
    """Every list of steps that is run: the file, and how it is written."""
    for path in sorted((ROOT / "tikv_br").rglob("*.py")) + sorted((ROOT / "incremental").rglob("*.py")):
        text = path.read_text()
        if "run_steps(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run_steps":
                yield path.relative_to(ROOT / "tikv_br").as_posix(), ast.unparse(node.args[0])


def covered() -> set[str]:
    """The names of all steps that some cell is of."""
    found = {cell.step for cell in cells(test_backup_steps.STEPS)}
    for example in (test_restore_steps.INGEST, test_restore_steps.PUT):
        found |= {cell.step for cell in cells(restore_steps(example))}
    return found | {cell.step for _variant, cell in test_drill_steps.chosen()} | test_drill_steps.READS_ONLY


def test_every_list_of_steps_is_known() -> None:
    """An operation that is a list of steps is in the matrix, or changes nothing."""
    assert set(run_somewhere()) == LISTS | NOT_BROKEN.keys()


def test_every_step_has_cells() -> None:
    """Also those that only some flag brings in."""
    steps = {name for file in FILES for name in named(file)}
    assert steps - NO_STEPS == covered() - NO_STEPS
