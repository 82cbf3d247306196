"""The matrix has every step of every operation that changes anything, or an exception with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.integration.crash.cells import cells
from tests.integration.crash.operations import (
    BACKUP_STEPS,
    COMPACTION_STEPS,
    INCREMENT_STEPS,
    INGEST,
    MERGE_STEPS,
    PUT,
    READS_ONLY,
    TXN_INGEST,
    TXN_STEPS,
    chosen_drills,
)
from tikv_br.restore.run import restore_steps, txn_restore_steps

ROOT = Path(__file__).resolve().parents[3]
RUNNERS = {"run_steps": 0, "run_backup": 1}
"""Functions that run a list of steps, and the position of that argument."""
LISTS = {
    ("tikv_br/dataflow/run.py", "steps"),
    ("tikv_br/backup/run.py", "backup_steps(options)"),
    ("tikv_br/backup/run.py", "txn_backup_steps(options)"),
    ("tikv_br/backup/merge.py", "merge_steps(options)"),
    ("incremental/backup.py", "increment_steps(options)"),
    ("tikv_br/archive/compact.py", "compaction_steps(options)"),
    ("tikv_br/restore/run.py", "steps(options)"),
    ("tikv_br/drill/run.py", "steps"),
    ("tikv_br/drill/run.py", "_leased(report_steps(), held)"),
}
"""Lists of steps that are broken, where they are run."""
NOT_BROKEN = {
    ("tikv_br/verify/run.py", "verify_steps(options)"): "reads only",
    ("tikv_br/diff/run.py", "COMPARISON"): "reads only",
    (
        "tikv_br/diff/run.py",
        "REPAIR",
    ): "puts and deletes as any client does: interrupted, it has done less, and is run again",
    ("tikv_br/bulk_load/run.py", "put_steps(compare=options.checksum)"): "puts as any client does, and is run again",
    (
        "tikv_br/bulk_load/run.py",
        "stage_steps(dry_run=options.dry_run)",
    ): "the next run discards it; the target is changed by a restore",
    (
        "tikv_br/bulk_load/runs.py",
        "merge_steps()",
    ): "removes its files when it fails; the target is changed by a restore",
    ("tikv_br/export/run.py", "EXPORT"): "without _SUCCESS its files are no export, and the next run removes them",
}
NO_STEPS = {"plan the changes"}
"""Steps of a dry run."""
FILES = (
    "tikv_br/backup/run.py",
    "tikv_br/backup/run.py",
    "tikv_br/backup/merge.py",
    "incremental/backup.py",
    "tikv_br/archive/compact.py",
    "tikv_br/restore/run.py",
    "tikv_br/restore/run.py",
    "tikv_br/drill/run.py",
)


def named(file: str) -> Iterator[str]:
    """The names of all steps that a file makes."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "FunctionStep":
            name = node.args[0]
            assert isinstance(name, ast.Constant | ast.Name), "a step has one name"
            yield str(name.value) if isinstance(name, ast.Constant) else getattr(module, name.id)


def run_somewhere() -> Iterator[tuple[str, str]]:
    """Every list of steps that is run: the file, and how it is written."""
    for path in sorted((ROOT / "tikv_br").rglob("*.py")) + sorted((ROOT / "incremental").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS:
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.args[RUNNERS[node.func.id]])


def covered() -> set[str]:
    """The names of all steps that some cell is of."""
    lists = (BACKUP_STEPS, TXN_STEPS, INCREMENT_STEPS, MERGE_STEPS, COMPACTION_STEPS)
    found = {step.name for steps in lists for step in steps}
    for steps in (restore_steps(INGEST), restore_steps(PUT), txn_restore_steps(TXN_INGEST)):
        found |= {cell.step for cell in cells(steps)}
    return found | {cell.step for _variant, cell in chosen_drills()} | READS_ONLY


def test_every_list_of_steps_is_known() -> None:
    """An operation that is a list of steps is in the matrix, or changes nothing."""
    assert set(run_somewhere()) == LISTS | NOT_BROKEN.keys()


def test_every_step_has_cells() -> None:
    """Also those that only some flag brings in."""
    steps = {name for file in FILES for name in named(file)}
    assert steps - NO_STEPS == covered() - NO_STEPS
