"""The user's settings for Spark: how they are read, what they win over, and where they are not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tikv_br.errors import SparkUnavailable, UsageError
from tikv_br.redaction import redact
from tikv_br.tasks.session import _escaped, spark_context
from tikv_br.tasks.settings import NO_SETTINGS, SessionPlan, SparkSettings, _limits

SECRET = "a value that is secret"


class Known(dict[str, str]):
    """Stand-in for a JVM's SparkConf that has read ``spark-defaults.conf``."""

    def contains(self, name: str) -> bool:
        """Whether it has a setting."""
        return name in self


def session_conf(known: dict[str, str], master: str = "spark://h:7077", **plan: Any) -> dict[str, str]:  # noqa: ANN401
    """The settings of a session."""
    made = SessionPlan(master, plan.get("concurrency"), plan.get("settings", NO_SETTINGS))
    return dict(made.session_conf(Known(known)).getAll())


@pytest.mark.parametrize(
    "text", ["spark.a", "=b", "a=b", "spark.=b", "spark.a b=c", "spark.master=local", "spark.a:b=c"]
)
def test_malformed_settings_are_refused_without_their_value(text: str) -> None:
    """It may be a secret, misspelt."""
    with pytest.raises(UsageError) as caught:
        SparkSettings.parse([text + SECRET])
    assert SECRET not in caught.value.message + caught.value.hint


def test_secrets_are_neither_shown_nor_pickled() -> None:
    """Options are in messages and travel to tasks; `config show` masks what Spark's own pages mask."""
    settings = SparkSettings.parse([f"spark.hadoop.fs.s3a.secret.key={SECRET}"])
    assert SECRET not in repr(settings)
    assert SECRET.encode() not in pickle.dumps(settings)
    assert pickle.loads(pickle.dumps(settings)) == NO_SETTINGS
    assert "hidden" not in redact("--spark-conf spark.hadoop.fs.s3a.secret.key=hidden")
    assert "hidden" not in redact("spark-conf=spark.ssl.keyPassword=hidden")


def test_the_jvm_is_launched_without_the_user_s_settings() -> None:
    """The launch settings are in its arguments."""
    plan = SessionPlan("spark://h:1", 2, SparkSettings((("spark.a", SECRET),)))
    assert SECRET not in str(plan.launch_conf().getAll())
    assert dict(plan.session_conf(Known()).getAll())["spark.a"] == SECRET


def test_precedence_of_settings() -> None:
    """The user over `spark-defaults.conf`, both over our defaults, --concurrency over both."""
    assert session_conf({})["spark.task.maxFailures"] == "4"
    assert "spark.task.maxFailures" not in session_conf({"spark.task.maxFailures": "9"})
    mine = SparkSettings((("spark.ui.enabled", "true"), ("spark.cores.max", "64")))
    found = session_conf({"spark.ui.enabled": "false"}, settings=mine, concurrency=3)
    assert (found["spark.ui.enabled"], found["spark.cores.max"]) == ("true", "3")


@pytest.mark.parametrize(
    ("master", "cores", "expected"),
    [
        ("spark://h:1", "", {"spark.cores.max": "6"}),
        ("spark://h:1", "8", {"spark.cores.max": "6", "spark.executor.cores": "6"}),
        ("yarn", "", {"spark.executor.instances": "6", "spark.dynamicAllocation.maxExecutors": "6"}),
        (
            "k8s://h",
            "4",
            {
                "spark.executor.cores": "4",
                "spark.executor.instances": "1",
                "spark.dynamicAllocation.maxExecutors": "1",
            },
        ),
    ],
)
def test_concurrency_limits_the_cores(master: str, cores: str, expected: dict[str, str]) -> None:
    """At most 6, on each kind of cluster, and no executor that is larger than the limit."""
    assert _limits(master, 6, cores) == expected


def test_an_archive_decides_which_python_starts(tmp_path: Path) -> None:
    """Unless the user names one; archives of the user are kept, and a name behind # is the folder's."""
    archive = tmp_path / "a.tar.gz"
    archive.touch()
    own = SparkSettings.parse(["spark.archives=b.zip"], str(archive)).properties
    assert own["spark.archives"] == f"b.zip,{archive}#environment"
    assert own["spark.pyspark.python"] == "./environment/bin/python"
    named = SparkSettings.parse(["spark.pyspark.python=/py"], "hdfs:///a.zip#there").properties
    assert named == {"spark.pyspark.python": "/py", "spark.archives": "hdfs:///a.zip#there"}
    with pytest.raises(UsageError, match="is not a file"):
        SparkSettings.parse([], str(tmp_path / "nothing.tar.gz"))
    with (
        pytest.raises(UsageError, match="for Spark clusters"),
        spark_context("local[1]", settings=SparkSettings.parse([], str(archive))),
    ):
        pass


def test_properties_are_escaped() -> None:
    """By the rules of java.util.Properties, where these would be two lines, a comment or a separator."""
    assert _escaped("a\n=\\é😀") == "\\u0061\\u000a\\u003d\\u005c\\u00e9\\ud83d\\ude00"


def test_a_master_that_is_not_there_is_found_out_at_once() -> None:
    """Without a JVM; all addresses are named."""
    with (
        pytest.raises(SparkUnavailable, match=r"127\.0\.0\.1:1: .*; localhost:2: "),
        spark_context("spark://127.0.0.1:1,localhost:2"),
    ):
        pass
