"""The settings of Spark: the user's, and a session's.

Settings come from ``spark-defaults.conf``, which Spark itself reads, then from the user's `SparkSettings`, then from here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tikv_br.errors import UsageError
from tikv_br.formats.numbers import parse_decimal

if TYPE_CHECKING:
    from pyspark import SparkConf

_ATTEMPTS = 4  # of a task whose worker dies; tasks that fail by themselves are not run again
_MASTER = re.compile(r"local|local\[(\*|[1-9]\d*)(,\d+)?\]|spark://[^/\s,]+:\d{1,5}(,[^/\s,]+:\d{1,5})*|yarn|k8s://\S+")
_ENVIRONMENT = "environment"
"""Folder into which executors unpack an archive."""
_OURS = {"spark.master": "--spark-master", "spark.submit.deployMode": "--spark-master, whose driver is this process"}
"""Settings that only we make, and what to pass instead."""
LOOPBACK = "127.0.0.1"
_SHELL = "pyspark-shell"
"""The name of an application that has none."""
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.python.worker.reuse": "true",
    "spark.task.maxFailures": str(_ATTEMPTS),
}
"""Settings unless the user has others."""


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The user's settings for Spark. Values may be secrets: they are in no representation, and do not travel to tasks."""

    conf: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    archive: str = ""
    """Archive with a Python environment for the executors: a path, or a URL that they can read; ``""`` = none."""

    @classmethod
    def parse(cls, conf: Sequence[str], archive: str = "") -> SparkSettings:
        """Settings as on the command line. Raises `UsageError`, without the values."""
        pairs = [text.partition("=") for text in conf]
        for number, (name, sign, value) in enumerate(pairs, 1):
            if not sign or not re.fullmatch(r"spark\.[^\s:#!]+", name) or "\0" in value:
                which = f" ({name})" if sign and name.startswith("spark.") else ""
                raise UsageError(
                    f"--spark-conf number {number}{which} is not KEY=VALUE",
                    hint="Keys begin with spark., for example --spark-conf spark.executor.memory=4g.",
                )
            if name in _OURS:
                raise UsageError(f"--spark-conf cannot set {name}", hint=f"Pass {_OURS[name]}.")
        if archive and ":" not in archive and not Path(archive.partition("#")[0]).is_file():
            raise UsageError(
                f"--spark-archive: {archive.partition('#')[0]} is not a file",
                hint="Make one with `tikv-br spark pack`.",
            )
        return cls(tuple((name, value.strip()) for name, _, value in pairs), archive)

    def __reduce__(self) -> tuple[type[SparkSettings], tuple[()]]:
        """Pickle as no settings: the options of an operation travel to its tasks, which need none of these."""
        return SparkSettings, ()

    @property
    def properties(self) -> dict[str, str]:
        found = dict(self.conf)
        if self.archive:
            archive = self.archive if "#" in self.archive else f"{self.archive}#{_ENVIRONMENT}"
            found["spark.archives"] = ",".join(filter(None, (found.get("spark.archives"), archive)))
            found.setdefault("spark.pyspark.python", f"./{archive.partition('#')[2]}/bin/python")
        return found


NO_SETTINGS = SparkSettings()


def is_local(master: str) -> bool:
    """Return whether ``master`` means threads of this machine."""
    return master == "local" or master.startswith("local[")


def check_master(master: str) -> None:
    """Raise `UsageError` for a master that Spark would not understand: no JVM has to start to find out."""
    if not _MASTER.fullmatch(master):
        raise UsageError(
            f"invalid Spark master {master!r}", hint="Pass local[*], local[4], spark://host:7077, yarn or k8s://…."
        )


def check_settings(master: str, settings: SparkSettings) -> None:
    """Raise `UsageError` for a master that Spark would not understand, or an archive for one that has no executors to unpack it."""
    check_master(master)
    if settings.archive and is_local(master):
        raise UsageError(
            f"--spark-archive is for Spark clusters, and --spark-master is {master}", hint="Leave one of them out."
        )


class SessionPlan(Struct, frozen=True):
    """Parameters for starting a session."""

    master: str
    concurrency: int | None
    settings: SparkSettings

    def launch_conf(self) -> SparkConf:
        """Return the settings that the JVM needs at its start. They are in its arguments, so without the user's."""
        from pyspark import SparkConf

        conf = SparkConf(loadDefaults=False).setMaster(_master(self.master, self.concurrency))
        conf.set("spark.ui.showConsoleProgress", "false")  # on by default in this kind of JVM
        if is_local(self.master):
            conf.setAll([("spark.driver.host", LOOPBACK), ("spark.driver.bindAddress", LOOPBACK)])
        return conf

    def session_conf(self, known: Any) -> SparkConf:  # noqa: ANN401 - py4j has no types
        """All settings of the session; ``known`` is the JVM's SparkConf, which has the user's."""
        conf = self.launch_conf()
        given = self.settings.properties

        def current(name: str, default: str = "") -> str:
            return given.get(name) or str(known.get(name, default))

        conf.setAll(list(given.items()))  # the JVM of spark-submit does not know them
        for name, value in _DEFAULTS.items():
            if name not in given and not known.contains(name):
                conf.set(name, value)
        if not current("spark.app.name") or current("spark.app.name") == _SHELL:
            conf.setAppName("tikv-br")
        if current("spark.pyspark.python"):
            conf.set("spark.pyspark.python", current("spark.pyspark.python"))
        if self.concurrency is not None and not is_local(self.master):
            conf.setAll(list(_limits(self.master, self.concurrency, current("spark.executor.cores")).items()))
        return conf


def _limits(master: str, concurrency: int, executor_cores: str) -> dict[str, str]:
    """Return settings that limit concurrent tasks on a cluster whose tasks take one core each."""
    cores = min(parse_decimal(executor_cores, 1 << 16) or 0, concurrency)
    own = (
        {"spark.executor.cores": str(cores)} if cores else {}
    )  # an executor that is larger than the limit never starts
    if master.startswith("spark://"):
        return own | {"spark.cores.max": str(concurrency)}
    executors = str(concurrency // (cores or 1))  # their executors have one core by default
    return own | {"spark.executor.instances": executors, "spark.dynamicAllocation.maxExecutors": executors}


def _master(master: str, concurrency: int | None) -> str:
    """Let a local master run a task again whose worker died (plain ``local[n]`` never does), on at most ``concurrency`` threads."""
    if not is_local(master):
        return master
    threads, _, attempts = (
        ("1", "", "") if master == "local" else master.removeprefix("local[").removesuffix("]").partition(",")
    )
    if concurrency is not None:
        threads = str(concurrency if threads == "*" else min(int(threads), concurrency))
    return f"local[{threads},{attempts or _ATTEMPTS}]"
