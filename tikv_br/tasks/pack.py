"""Packs this Python's tikv-br, with the packages that it needs, as an archive that executors unpack.

Not pyspark: workers use their Spark's. Not the interpreter: workers need one of the same version.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import tikv_br
from tikv_br.environment import is_installed, missing_package
from tikv_br.errors import OutputFailed, UsageError

_OURS = frozenset({"tikv-br", "tikv-br-core"})
_OF_SPARK = frozenset({"pyspark", "py4j"})
_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
_SITE = PurePosixPath("lib", _VERSION, "site-packages")
# PYTHONPATH instead of a virtual environment, whose interpreter must be at the same path on every machine. Spark's own entries come
# first: an executor must use the pyspark of its Spark.
_PYTHON = """#!/bin/sh
# Starts the Python that this archive was made with, or else the one of the same version on the PATH.
here=$(CDPATH= cd -- "${{0%/*}}/.." && pwd) || exit 1
PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}$here/{site}"
export PYTHONPATH
for python in {made_with} {version}; do
    if command -v "$python" >/dev/null 2>&1; then
        exec "$python" "$@"
    fi
done
echo "this host has neither {made_with} nor {version} on the PATH, which tikv-br was packed for" >&2
exit 127
"""


@dataclass(frozen=True, slots=True)
class PackSummary:
    """Contents of an archive."""

    path: str
    size: int
    """Size of the archive, in bytes."""
    files: int
    packages: tuple[str, ...]
    """Name and version of each."""
    python: str
    """Version of Python that workers need, such as 3.11."""


def pack(target: Path) -> PackSummary:
    """Write the archive; an existing file is replaced when all is written. Raises `UsageError`, `OutputFailed`, and `MachineUnfit` in the slim form."""
    if not target.name.endswith((".tar.gz", ".tgz")):
        raise UsageError(
            f"{target}: the name must end with .tar.gz or .tgz", hint="Spark unpacks archives by their suffix."
        )
    if not is_installed("pandas"):  # nor would it be in the archive
        raise missing_package("pandas", "tasks on Spark require")
    found = _closure()
    files = dict(_own_files())
    for each in found:
        files.update(_files(each))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with (
                os.fdopen(handle, "wb") as output,
                tarfile.open(fileobj=output, mode="w:gz", compresslevel=1) as archive,
            ):
                for path, source in sorted(files.items()):
                    archive.add(source, str(path), recursive=False, filter=_anonymous)
                _add_python(archive)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputFailed(f"cannot write {target}: {error}", hint="Check the folder and its free space.") from error
    packages = tuple(sorted(f"{each.metadata['Name']} {each.version}" for each in found))
    return PackSummary(str(target), target.stat().st_size, len(files) + 1, packages, _VERSION.removeprefix("python"))


def _closure() -> list[Distribution]:
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [("tikv-br", frozenset()), ("tikv-br-core", frozenset({"full"}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        if wanted in seen or wanted[0] in _OF_SPARK:
            continue
        seen.add(wanted)
        name, extras = wanted
        try:
            found[name] = installed = distribution(name)
        except PackageNotFoundError:  # for another platform or Python, by its marker
            continue
        for text in installed.requires or ():
            extra, requirement = _EXTRA.search(text), _REQUIREMENT.match(text)
            if requirement is not None and (extra is None or extra[1] in extras):
                more = frozenset(each.strip() for each in (requirement[2] or "").split(",") if each.strip())
                waiting.append((_normalized_name(requirement[1]), more))
    if not _OURS & found.keys():
        raise UsageError("tikv-br is not installed in this Python", hint="Install it, for example with pip or uv.")
    return list(found.values())


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files(found: Distribution) -> Iterator[tuple[PurePosixPath, Path]]:
    """Path in the archive and file of all that a distribution has installed. Raises `UsageError` if that is not known."""
    name = found.metadata["Name"]
    ours = _normalized_name(name) in _OURS
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") and not ours:
        raise UsageError(
            f"{name} is installed in editable mode: its files are elsewhere", hint=f"Install {name} normally."
        )
    if found.files is None:
        raise UsageError(f"{name} has no list of its files", hint=f"Install {name} with pip or uv.")
    for each in found.files:
        path = Path(str(found.locate_file(each)))
        inside = ".." not in each.parts and not each.is_absolute()
        if inside and path.is_file() and (not ours or each.parts[0].endswith(".dist-info")):
            yield _SITE / each, path


def _own_files() -> Iterator[tuple[PurePosixPath, Path]]:
    """The files of tikv-br where they are imported from, with the compiled kernels."""
    package = Path(tikv_br.__file__).parent
    for folder, _, names in os.walk(package, followlinks=True):  # two packages of a checkout are links
        for name in names:
            path = Path(folder, name)
            yield _SITE / "tikv_br" / PurePosixPath(path.relative_to(package)), path


def _add_python(archive: tarfile.TarFile) -> None:
    made_with = shlex.quote(str(Path(sys.executable).resolve()))
    script = _PYTHON.format(site=_SITE, made_with=made_with, version=_VERSION).encode()
    with tempfile.NamedTemporaryFile() as file:
        file.write(script)
        file.flush()
        entry = archive.gettarinfo(file.name, "bin/python")
        entry.mode = 0o755
        file.seek(0)
        archive.addfile(_anonymous(entry), file)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the user of this machine. Keep times: compiled kernels are valid for one state of their source."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o444
    return entry
