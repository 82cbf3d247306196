"""JuiceFS with its metadata in a cluster and its data in a folder; used without mounting it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.support.tools import find_tool

_COMPLAINT = re.compile(r"<(?:WARNING|ERROR|FATAL)>|panic:")
"""Lines of JuiceFS; client-go's own warnings, such as a slow timestamp, are about retries."""
_KNOWN = "Set storage tier: not supported"
"""A warning about folders in place of object storage."""


class JuiceFsFailed(Exception):
    """A command failed, or complained."""


@dataclass(frozen=True)
class JuiceFs:
    """A volume; ``folder`` holds everything that is not in the cluster."""

    pd: str
    folder: Path
    name: str = "vol"

    @property
    def url(self) -> str:
        """The URL of the metadata; its path is the prefix of all keys."""
        return f"tikv://{self.pd}/{self.name}"

    @property
    def blocks(self) -> list[Path]:
        """The objects that hold data."""
        return sorted(path for path in (self.folder / "bucket").rglob("chunks/**/*") if path.is_file())

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; ``jfs://NAME/`` is the volume."""
        program = find_tool("juicefs", hint="run scripts/install_juicefs.sh, or set JUICEFS", variable="JUICEFS")
        environment = {**os.environ, "HOME": str(self.folder), self.name: self.url}
        return subprocess.Popen(
            [program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *arguments: str, timeout: float = 120) -> str:
        """The output of a command. Raises `JuiceFsFailed`, also for a warning or an error in its log."""
        with self.start(*arguments) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            finally:
                process.kill()
        complaints = [line for line in output.splitlines() if _COMPLAINT.search(line) and _KNOWN not in line]
        if process.returncode or complaints:
            raise JuiceFsFailed(f"{arguments} ended with {process.returncode}:\n{output}")
        return output

    def format(self) -> None:
        """Make the volume."""
        self.run("format", "--storage", "file", "--bucket", f"{self.folder / 'bucket'}/", self.url, self.name)

    def mdtest(self, folder: str, *options: str) -> list[str]:
        """The arguments of a workload: directories and empty files in a new folder of the volume."""
        local = ["--cache-dir", "memory", "--metrics", "127.0.0.1:0", "--no-usage-report"]
        return ["mdtest", self.url, folder, *local, *options]

    def copy_in(self, source: Path, folder: str) -> None:
        """Copy a local folder's content into one of the volume."""
        self.run("sync", "--perms", f"{source}/", f"jfs://{self.name}/{folder}/")

    def copy_out(self, folder: str, target: Path) -> None:
        """Copy a folder's content out of the volume."""
        self.run("sync", f"jfs://{self.name}/{folder}/", f"{target}/")

    def fsck(self) -> str:
        """Check that all data of the metadata are there. Raises `JuiceFsFailed`."""
        return self.run("fsck", self.url)

    def dump(self, *options: str) -> dict[str, Any]:
        """All metadata."""
        path = self.folder / "dump.json"
        self.run("dump", self.url, str(path), *options)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def files_in(entry: dict[str, Any], path: str = "") -> dict[str, int]:
    """Paths and lengths of all files below an entry of a dump."""
    if "entries" not in entry:
        return {path: entry["attr"]["length"]}
    found: dict[str, int] = {}
    for name, child in entry["entries"].items():
        found |= files_in(child, f"{path}/{unquote(name)}")
    return found
