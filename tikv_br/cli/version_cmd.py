"""``tikv-br version``."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

from tikv_br import __version__
from tikv_br.cli.options import OutputForm, OutputOption
from tikv_br.cli.output import Output

app = typer.Typer(rich_markup_mode=None)
STANDS_ON = ("pyspark", "pyarrow", "grpcio", "obstore", "boto3", "numba")


@app.command("version")
def version(output: OutputOption = OutputForm.CONSOLE) -> None:
    """Show the versions of tikv-br and what it stands on."""
    versions = {"tikv-br": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in STANDS_ON}
    out = Output(output)
    out.result("version", {"versions": versions})
    out.table(("package", "version"), list(versions.items()))
