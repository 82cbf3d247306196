"""Packages in an archive, and the start of its Python."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from importlib.metadata import PathDistribution
from pathlib import Path, PurePosixPath

import pytest

from tikv_br.errors import UsageError
from tikv_br.tasks import pack


def install(folder: Path, name: str, files: dict[str, str], *more: str, requires: tuple[str, ...] = ()) -> None:
    """Install a package as pip does; ``more`` are files of its record that are elsewhere."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
    (info / "RECORD").write_text("\n".join(f"{each},," for each in (*files, *more, f"{info.name}/METADATA")))


def test_requirements_of_tikv_br_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirements of requirements and of requested extras; not pyspark, other extras, or what a marker excludes."""
    needs = (
        "A_One>=1",
        "b[fast]; python_version > '3'",
        "pyspark>=4",
        "gone; sys_platform == 'win32'",
        "test ; extra == 'dev'",
    )
    install(tmp_path, "tikv_br", {}, requires=needs)
    install(tmp_path, "a_one", {"a_one.py": ""}, requires=("b", "c"))
    install(tmp_path, "b", {"b/__init__.py": ""}, requires=("d; extra == 'fast'", "test; extra == 'slow'"))
    for name in ("c", "d", "test", "pyspark"):
        install(tmp_path, name, {f"{name}.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert sorted(each.metadata["Name"] for each in pack._closure()) == ["a_one", "b", "c", "d", "tikv_br"]


def test_files_outside_the_environment_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    """Scripts in ``bin`` start a Python of this machine."""
    install(tmp_path, "a", {"a/__init__.py": "", "a/lib.so": "x"}, "../../bin/a", "a/gone.pyc")
    found = dict(pack._files(PathDistribution(tmp_path / "a-1.0.dist-info")))
    names = {str(path.relative_to(pack._SITE)) for path in found}
    assert names == {"a/__init__.py", "a/lib.so", "a-1.0.dist-info/METADATA"}


def test_a_package_in_editable_mode_is_refused(tmp_path: Path) -> None:
    """Its files are not where the archive takes them from."""
    install(tmp_path, "a", {"a.pth": "/elsewhere"})
    (tmp_path / "a-1.0.dist-info" / "direct_url.json").write_text(
        '{"dir_info": {"editable": true}, "url": "file:///x"}'
    )
    with pytest.raises(UsageError, match="a is installed in editable mode"):
        list(pack._files(PathDistribution(tmp_path / "a-1.0.dist-info")))


def test_its_python_finds_its_packages_after_those_of_spark(tmp_path: Path) -> None:
    """By its real path, from any folder; a host without that Python gets an error that names it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        pack._add_python(archive)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(tmp_path, filter="data")
    program = str(PurePosixPath(tmp_path, "bin", "python"))
    bare = {"PATH": os.defpath, "PYTHONPATH": "/of/spark"}
    code = "import sys; print(sys.path[1:3])"
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=True, env=bare, cwd="/")
    assert done.stdout.strip() == str(["/of/spark", str(tmp_path / pack._SITE)])
    script = Path(program).read_text().replace(str(Path(sys.executable).resolve()), "/nowhere/python")
    Path(program).write_text(script)
    lost = subprocess.run(
        [program, "-c", code], capture_output=True, text=True, check=False, env={"PATH": "/nowhere"}, cwd="/"
    )
    assert lost.returncode == 127
    assert "this host has neither /nowhere/python nor python3" in lost.stderr
