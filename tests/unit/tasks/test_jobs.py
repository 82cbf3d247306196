"""Errors of workers that cannot run tasks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark import cloudpickle

from tikv_br import __version__
from tikv_br.errors import SparkUnavailable, SparkWorkerUnfit
from tikv_br.tasks import session, shipped
from tikv_br.tasks.session import by_value, unfit_worker

LOAD = "import pickle, sys; f = pickle.loads(sys.stdin.buffer.read()); print(list(f([1, 2])))"


def run_elsewhere(function: object, folder: Path) -> str:
    """Run a pickled function in a Python that has the modules of a folder, and those of pyspark."""
    paths = [str(folder), *map(str, (Path(next(iter(pyspark.__path__))) / "python" / "lib").glob("*.zip"))]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {paths!r}; {LOAD}"],
        input=cloudpickle.dumps(function),  # type: ignore[no-untyped-call]
        capture_output=True,
        check=False,
    )
    return (done.stdout + done.stderr).decode()


def double(row: int) -> int:
    """A function by name, as all of ours travel."""
    return 2 * row


def test_a_worker_without_tikv_br_says_so(tmp_path: Path) -> None:
    """The function loads there, and its error becomes ours, with the host."""
    said = run_elsewhere(by_value(partial(map, double)), tmp_path)
    assert "RuntimeError" in said
    error = unfit_worker(RuntimeError(said))
    assert error is not None
    assert f"no tikv-br (No module named 'tikv_br'), this machine has {__version__}" in error.message
    assert "spark pack" in error.hint


def test_a_worker_with_another_version_says_both(tmp_path: Path) -> None:
    """Both versions."""
    (tmp_path / "tikv_br").mkdir()
    (tmp_path / "tikv_br" / "__init__.py").write_text('__version__ = "0.0.7"\n')
    error = unfit_worker(RuntimeError(run_elsewhere(by_value(partial(map, double)), tmp_path)))
    assert error is not None
    assert f"has tikv-br 0.0.7, this machine has {__version__}" in error.message


def test_a_worker_without_a_package_names_it(tmp_path: Path) -> None:
    """Packages of tikv-br, and of the function's own modules."""
    (tmp_path / "tikv_br").mkdir()
    (tmp_path / "tikv_br" / "__init__.py").write_text(f'__version__ = "{__version__}"\n')
    error = unfit_worker(RuntimeError(run_elsewhere(by_value(partial(map, double)), tmp_path)))
    assert error is not None
    assert "without a module that it needs (No module named 'tests'" in error.message
    assert "grpc9" in shipped.problem_of_worker(__version__, ["grpc9"])


def test_a_worker_with_tikv_br_runs_the_function() -> None:
    """Here, after the journey."""
    function = pickle.loads(cloudpickle.dumps(by_value(partial(map, double))))  # type: ignore[no-untyped-call]
    assert list(function([1, 2])) == [2, 4]
    assert shipped.problem_of_worker(__version__, ["pyarrow"]) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            (
                "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.5 executor 1): org.apache.spark.api.python.PythonException: "
                "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different "
                "version: 3.10 than that in driver: 3.11, PySpark cannot run with different minor versions."
            ),
            "the Spark worker 10.0.0.5 cannot run tasks: it has Python 3.10, this machine has 3.11",
        ),
        (
            (
                "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.5 executor 1): java.io.IOException: Cannot run program "
                '"./environment/bin/python": error=2, No such file or directory'
            ),
            (
                "the Spark worker 10.0.0.5 cannot run tasks: it has no Python that can be started: ./environment/bin/python: "
                "error=2, No such file or directory"
            ),
        ),
    ],
)
def test_errors_of_spark_about_python_become_ours(text: str, message: str) -> None:
    """With the host, which Spark says beside the task."""
    error = unfit_worker(RuntimeError(text))
    assert error is not None
    assert error.message == message


def test_other_errors_stay() -> None:
    """They are no worker's Python."""
    assert unfit_worker(RuntimeError("Job aborted due to stage failure")) is None


class Idle:
    """A session whose cluster starts no task."""

    defaultParallelism = 2  # noqa: N815 - its name in Spark

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Whatever is called."""
        values = {"getActiveStageIds": [1], "getStageInfo": SimpleNamespace(numActiveTasks=0, numCompletedTasks=0)}
        values["get"] = "10.0.0.9"
        never = threading.Event()
        return lambda *_args, **_kwargs: never.wait(60) if name == "runJob" else values.get(name, self)


class OneExecutor(Idle):
    """A session of whose executors only the first one has started, without tikv-br."""

    def runJob(self, _rows: object, _function: object, partitions: list[int]) -> list[tuple[str, str]]:  # noqa: N802 - as Spark calls it
        """Run a job on the first partition; another one would wait for the other executors."""
        assert partitions == [0]
        return [("bare", "no tikv-br")]


def test_a_cluster_is_refused_by_its_first_executor() -> None:
    """The others, which may take long to start, are not waited for."""
    with pytest.raises(SparkWorkerUnfit, match="bare cannot run tasks: it has no tikv-br"):
        session.check_workers(OneExecutor(), "spark://h:1")  # type: ignore[arg-type]


def test_a_cluster_that_starts_no_task_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to check: resources of the cluster, and the way to the driver."""
    monkeypatch.setattr(session, "_EXECUTOR_SECONDS", 0.3)
    monkeypatch.setattr(session, "_CANCEL_SECONDS", 0.1)
    with pytest.raises(SparkUnavailable, match=r"no executor of spark://h:1 ran a task") as caught:
        session.check_workers(Idle(), "spark://h:1")  # type: ignore[arg-type]
    assert "10.0.0.9" in caught.value.hint
