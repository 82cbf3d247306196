"""A standalone Spark cluster of this machine's pyspark, whose workers' Python has every package but tikv-br."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark

from tests.support.waiting import PATIENCE, eventually

SPARK_HOME = Path(next(iter(pyspark.__path__)))
ROOT = Path(__file__).parents[2]
_ADDRESS = re.compile(r"spark://[\w.]+:\d+")


def make_python(folder: Path) -> Path:
    """Make an environment with all packages of this one but tikv-br and pyspark, and return its Python."""
    venv.create(folder, symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not each.name.startswith(("tikv_br", "pyspark", "py4j", "_editable", "__pycache__"))
            and each.suffix != ".pth"
        ):
            (packages / each.name).symlink_to(each)
    (_site_packages(folder) / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def make_archive(folder: Path, python: Path) -> Path:
    """Make an environment archive as venv-pack does: tikv-br with its compiled kernels; other packages are those of a Python."""
    venv.create(folder / "shipped", symlinks=True)
    (_site_packages(folder / "shipped") / "packages.pth").write_text(f"{python.parents[1] / 'packages'}\n")
    archive = folder / "shipped.tar.gz"
    inner = _site_packages(folder / "shipped").relative_to(folder / "shipped")
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        file.add(folder / "shipped", ".")
        file.dereference = True  # two packages of a checkout are links
        file.add(ROOT / "tikv_br", str(inner / "tikv_br"))
    return archive


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


class SparkCluster:
    """A master and two workers of one core each, as processes of this machine."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYSPARK_PYTHON": str(python),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[psutil.Process] = []
        self.master = ""

    def start(self) -> None:
        """Start all, and wait until both workers are registered."""
        log = self._launch("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0")
        eventually(lambda: _ADDRESS.search(log.read_text()), 2 * PATIENCE)
        found = _ADDRESS.search(log.read_text())
        assert found is not None
        self.master = found[0]
        for _ in range(2):
            self.add_worker()
        eventually(lambda: log.read_text().count("Registering worker") == 2, 2 * PATIENCE)

    def add_worker(self) -> None:
        """Start a worker, without waiting for it."""
        name = f"worker{len(self._processes)}"
        limits = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / name))
        self._launch(name, "org.apache.spark.deploy.worker.Worker", *limits, self.master)
        self.workers.append(psutil.Process(self._processes[-1].pid))

    def lose_worker(self, pid: int) -> None:
        """Kill a worker, but not its executors."""
        (lost,) = (each for each in self.workers if each.pid == pid)
        self.workers.remove(lost)
        lost.kill()

    def executors(self) -> list[psutil.Process]:
        """The running executors of the newest application; those of an earlier one may take a moment to end."""
        found: dict[str, list[psutil.Process]] = {}
        for worker in self.workers:
            with contextlib.suppress(psutil.Error):
                for each in worker.children():
                    words = each.cmdline()
                    if "--app-id" in words:
                        found.setdefault(words[words.index("--app-id") + 1], []).append(each)
        return found[max(found)] if found else []

    def started(self) -> dict[str, int]:
        """Number of executors that each application has had, by its id."""
        return Counter(each.parent.name for each in self._folder.glob("worker*/app-*/*") if each.is_dir())

    def stop(self) -> None:
        """End every process, and those that they have started."""
        for process in self._processes:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait(PATIENCE)
            for each in family:
                with contextlib.suppress(psutil.Error):
                    each.kill()

    def _launch(self, name: str, *command: str) -> Path:
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), command[0], "--webui-port", "0", *command[1:]],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                cwd=self._folder,
            )
        self._processes.append(process)
        return log


@contextlib.contextmanager
def spark_cluster(folder: Path, python: Path) -> Iterator[SparkCluster]:
    """Run a cluster for the length of the block."""
    cluster = SparkCluster(folder, python)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
