"""Checks before a JVM starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyspark.java_gateway
import pytest
from pyspark import SparkConf

from tikv_br.errors import SparkUnavailable, UsageError
from tikv_br.tasks import session
from tikv_br.tasks.session import _launch_jvm, _properties_file, _reason, check_java, spark_context
from tikv_br.tasks.settings import _master, check_master, is_local


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[4]", "local[*,3]", "spark://host:7077", "yarn", "k8s://https://h:6443"]
)
def test_masters_of_spark_are_taken(master: str) -> None:
    """Every form that Spark documents passes."""
    check_master(master)


@pytest.mark.parametrize("master", ["", "moon://x", "local[", "local[0]", "local(4)", "spark://"])
def test_other_masters_are_refused_at_once(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error is reported before a JVM has started."""
    monkeypatch.setattr(session, "_launch_jvm", lambda *_: pytest.fail("a JVM is started"))
    with pytest.raises(UsageError, match="Spark master"), spark_context(master):
        pass


@pytest.mark.parametrize(
    ("master", "concurrency", "expected"),
    [
        ("local", None, "local[1,4]"),
        ("local[*]", None, "local[*,4]"),
        ("local[*]", 3, "local[3,4]"),
        ("local[2]", 8, "local[2,4]"),
        ("local[4]", 2, "local[2,4]"),
        ("local[4,9]", 2, "local[2,9]"),
        ("local[2,9]", None, "local[2,9]"),
        ("spark://h:7077", 8, "spark://h:7077"),
    ],
)
def test_local_masters_run_a_lost_task_again(master: str, concurrency: int | None, expected: str) -> None:
    """A local master gets attempts, and threads where none were said; others stay as they are."""
    assert _master(master, concurrency) == expected


def test_local_means_this_machine() -> None:
    """Only masters of this machine bind to loopback."""
    assert is_local("local[2]")
    assert not is_local("spark://localhost:7077")


def fake_java(folder: Path, version: str) -> None:
    """Put a Java into ``folder`` that knows its version only."""
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21), ("24-ea", 24)])
def test_java_is_recognised(version: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME counts, and versions of all spellings are read."""
    fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java() == major


def test_old_java_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java 11 is refused with both versions in the message."""
    fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match=r"version 11, Spark requires 17"):
        check_java()


def test_missing_java_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JAVA_HOME and without java on the PATH the message names both."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkUnavailable, match="JAVA_HOME"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match="cannot run Java"):
        check_java()


def test_no_python_runs_between_fork_and_exec_of_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function for the child is left out, and a process group keeps Ctrl-C from the JVM."""
    given: dict[str, object] = {}

    def popen(_command: list[str], **arguments: object) -> None:
        given.update(arguments)
        raise FileNotFoundError("no JVM in this test")

    monkeypatch.setattr(pyspark.java_gateway, "Popen", popen)
    with tempfile.TemporaryFile() as log, pytest.raises(FileNotFoundError):
        _launch_jvm(SparkConf(loadDefaults=False), log)
    assert given.keys() == {"stdin", "stdout", "stderr", "env", "process_group"}
    assert given["process_group"] == 0


@pytest.mark.parametrize(
    ("variables", "message", "hint"),
    [
        ({"SPARK_HOME": "{folder}"}, "has no bin/spark-submit", "Unset SPARK_HOME"),
        ({"SPARK_HOME": "{folder}/old"}, "is Spark 3.5.1, and the pyspark", "Unset SPARK_HOME"),
        ({"PYSPARK_GATEWAY_PORT": "abc"}, "PYSPARK_GATEWAY_PORT=abc is not a port", "Unset PYSPARK_GATEWAY_PORT"),
        ({"JAVA_TOOL_OPTIONS": "-Xnonsense"}, "Unrecognized option: -Xnonsense", "JAVA_TOOL_OPTIONS"),
    ],
)
def test_variables_of_another_installation_are_named(
    variables: dict[str, str], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the cause and the hint the variable, not the advice to install Java."""
    old = tmp_path / "old"
    for file in (old / "bin" / "spark-submit", old / "jars" / "spark-core_2.12-3.5.1.jar"):
        file.parent.mkdir(parents=True)
        file.touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    with pytest.raises(SparkUnavailable, match=message) as failure:
        check_java()
    assert hint in failure.value.hint
    assert "Install Java" not in failure.value.hint


def test_submit_arguments_that_cannot_be_parsed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quotation without end, with and without settings of ours."""
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf 'spark.x=1")
    for properties in ({}, {"spark.y": "2"}):
        with pytest.raises(SparkUnavailable, match="PYSPARK_SUBMIT_ARGS") as failure, _properties_file(properties):
            pass
        assert "PYSPARK_SUBMIT_ARGS is set" in failure.value.hint


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Error: Unrecognized option: --nonsense\n" + "usage: of many lines\n" * 400, "Error: Unrecognized option"),
        ("To adjust logging level use sc.setLogLevel, error\nException in thread main\n", "Exception in thread"),
        ("Error occurred during initialization of VM\nCould not reserve enough space\n", "Could not reserve"),
        ("", ""),
    ],
)
def test_reason_is_the_line_that_names_it(output: str, reason: str) -> None:
    """Not the last line of a page of usage, nor a heading."""
    assert _reason(output).startswith(reason)
