"""``tikv-br spark pack``, and the program under ``spark-submit``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from tikv_br.cli import shared
from tikv_br.cli.command import REQUIRED, argument, command, variable
from tikv_br.cli.output import human_bytes, listed
from tikv_br.tasks.session import submitted_master


class PackFlags(shared.CommandFlags):
    file: str = argument(REQUIRED, "FILE", "Archive to write; its name ends with .tar.gz.")


@command("spark pack", example="tikv-br.tar.gz")
def pack_environment(flags: PackFlags) -> None:
    """Pack tikv-br and the packages that it needs as an archive for --spark-archive. Workers need the same version of Python."""
    from tikv_br.tasks.pack import pack

    done = pack(Path(flags.file))
    figures = [
        ("file", done.path),
        ("size", human_bytes(done.size)),
        ("files", f"{done.files:,}"),
        ("packages", ", ".join(done.packages)),
        ("python", done.python),
    ]
    flags.out.result("archive", asdict(done), listed("Archive written", figures))


def run_submitted() -> int:
    """Run the command line under ``spark-submit``, on the master that it was given, and return the exit code."""
    from tikv_br.cli.main import run

    name = variable((), "spark-master")
    master = submitted_master()
    if master:
        os.environ.setdefault(name, master)
    return run()
