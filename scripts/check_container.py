#!/usr/bin/env python3
"""Run the steps of a Dockerfile without Docker, and the program of the image: ``sudo scripts/check_container.py [FOLDER [DOCKERFILE]]``.

Each stage is an overlay file system over Debian 12 with its own Python 3.11, from debootstrap, in place of the base image. RUN steps
run in it as they stand, with this machine's configuration of apt and pip. Then the program runs as the image's user, with a read-only root and a /tmp
of its own: its version, and a backup and a restore between playgrounds through Spark, without any kernel compiled. `Dockerfile.core` gives
an image without Spark and playground: a restore and a sync between playgrounds of this machine's .venv, on threads.

Needs root, debootstrap, unshare and Debian 12, and 3 minutes of processor time; FOLDER (default: .cache/container) keeps the base for the next run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "WORKDIR", "ENV", "USER", "HEALTHCHECK", "ENTRYPOINT"}
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
MOUNTED_CERTIFICATES = "/mnt/ca-certificates.crt"
"""Elsewhere, as packages that are installed change the original."""
PACKAGES = "python3,python3-dev,python3-venv,python3-pip,ca-certificates"
CORE = "Dockerfile.core"
CORE_SESSION = """
set -eu
value() { python -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"; }
rows() { tikv-br raw checksum --pd "$1" --output json | value total_kvs; }
for name in java gcc; do
    if command -v $name; then exit 1; fi
done
python -c 'import importlib.util as find; assert not [each for each in ("numba", "pyspark", "pandas") if find.find_spec(each)]'
tikv-br raw import --pd "$ONE" --count 1000 --seed 7 --quiet
tikv-br backup raw --pd "$ONE" --storage /tmp/backup --engine scan --safe-interval 3s --quiet
tikv-br verify --storage /tmp/backup --level data --quiet
tikv-br restore raw --pd "$TWO" --storage /tmp/backup --quiet
test "$(rows "$TWO")" = 1000
tikv-br sync --pd "$ONE" --sink "tikv://$TWO" --from-backup /tmp/backup --state-dir /tmp/state --scratch-dir /tmp --quiet &
sync=$!
tikv-br raw put later value --pd "$ONE" --quiet
for _ in $(seq 120); do test "$(rows "$TWO")" = 1001 && break; sleep 1; done
test "$(rows "$TWO")" = 1001
kill $sync
wait $sync || true
echo "without numba, Spark and Java"
"""
SESSION = """
set -eu
tikv-br --version
value() { python -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"; }
for name in one two; do
    tikv-br playground start --dir /tmp/$name --api-version v2 --stores 1 --detach --output json >/tmp/$name.json
done
one=$(value pd </tmp/one.json) two=$(value pd </tmp/two.json)
trap 'tikv-br playground stop --dir /tmp/one; tikv-br playground stop --dir /tmp/two' EXIT
tikv-br raw import --pd "$one" --count 1000 --seed 7 --quiet
tikv-br backup raw --pd "$one" --storage /tmp/backup --executor spark --engine scan --safe-interval 3s --quiet
tikv-br restore raw --pd "$two" --storage /tmp/backup --quiet
test "$(tikv-br raw checksum --pd "$two" --output json | value total_kvs)" = 1000
python -c 'import sys; from tikv_br.formats import jit; sys.exit(jit.EXTENSION is None)'
if find / /tmp -xdev -name '*.nbi' 2>/dev/null | grep .; then exit 1; fi
echo "no kernel was compiled"
"""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, with the rest of its line."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words after it, without flags."""
        return [each for each in shlex.split(self.text) if not each.startswith("--")]

    def flag(self, name: str) -> str:
        """The value of ``--name=``; empty without it."""
        found = [each.partition("=")[2] for each in shlex.split(self.text) if each.startswith(f"--{name}=")]
        return found[0] if found else ""


@dataclass(slots=True)
class Stage:
    """A FROM with what follows it."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)


def read_stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile. Raises `ValueError` for an instruction that this script does not know."""
    stages: list[Stage] = []
    lines = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name not in INSTRUCTIONS:
            raise ValueError(f"the instruction {name} is not known here: {line}")
        if name == "FROM":
            stages.append(Stage(rest.partition(" AS ")[2]))
        elif stages:
            stages[-1].instructions.append(Instruction(name, rest.strip()))
    return stages


def context_files(root: Path) -> Iterator[Path]:
    """Return the build context without the files of `.dockerignore`: relative paths, where the last matching pattern wins."""
    patterns = [
        (not line.startswith("!"), _regex(line.removeprefix("!")))
        for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    included = {
        line[1:] for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"
    }
    for top in sorted(included):
        for path in [root / top, *sorted((root / top).rglob("*"))]:
            name = path.relative_to(root).as_posix()
            if path.is_file() and not [ignored for ignored, regex in patterns if regex.fullmatch(name)][-1]:
                yield Path(name)


def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile(
        "".join(parts.get(each, re.escape(each)) for each in re.split(r"(\*\*/|\*)", pattern)) + "(?:/.*)?"
    )


class Build:
    """Runs the stages below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._base = folder, folder / "base"
        self._environment: dict[str, str] = {}
        self._user, self._directory = "0:0", "/"

    def prepare_base(self) -> None:
        """Debian 12 with the names of Python that the base image has."""
        if (self._base / "usr/local/bin/pip").exists():
            return
        shutil.rmtree(self._base, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(self._base)], check=True
        )
        (self._base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        (self._base / "usr/local/bin/pip").symlink_to("/usr/bin/pip3")

    def run_stage(self, stage: Stage) -> None:
        """Run its instructions in an empty layer."""
        upper = self._upper(stage.name)
        for folder in (upper, self._folder / "work"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._environment = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        self._user, self._directory = "0:0", "/"
        for each in stage.instructions:
            print(f"==> {each.name} {each.text}", file=sys.stderr)
            self._run_instruction(stage, each)

    def _run_instruction(self, stage: Stage, each: Instruction) -> None:
        match each.name:
            case "COPY":
                self._copy(stage, each)
            case "RUN":
                self.run(stage, "/bin/sh", "-c", each.text)
            case "WORKDIR":
                self._directory = each.text
                (self._upper(stage.name) / each.text[1:]).mkdir(parents=True, exist_ok=True)
            case "ENV":
                name, _, value = each.text.partition("=")
                self._environment[name] = value.replace("$PATH", self._environment["PATH"])
            case "USER":
                self._user = each.text
                self._environment["HOME"] = "/tmp"  # noqa: S108 - within the image, as in deploy/kubernetes

    def _copy(self, stage: Stage, each: Instruction) -> None:
        *sources, target = each.words
        to = self._upper(stage.name) / str(Path(self._directory, target))[1:]
        if origin := each.flag("from"):
            shutil.copytree(self._upper(origin) / sources[0][1:], to, symlinks=True)
            return
        files = list(context_files(PROJECT))
        for source in sources:
            for file in (each for each in files if each.is_relative_to(source)):
                name = file.relative_to(source) if (PROJECT / source).is_dir() else file.name
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(PROJECT / file, to / name)

    def run(self, stage: Stage, *command: str, read_only: bool = False, more: Mapping[str, str] | None = None) -> None:
        """Run a command in the stage, in name spaces of its own for mounts and processes, with more variables."""
        root = self._folder / "root"
        root.mkdir(exist_ok=True)
        layers = f"lowerdir={self._base},upperdir={self._upper(stage.name)},workdir={self._folder / 'work'}"
        script = [
            f"mount -t overlay overlay -o {shlex.quote(layers)} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --bind /dev {root}/dev",
            *(
                f"mount --bind {each} {root}{at} && mount -o remount,ro,bind {root}{at}"
                for each, at in self._settings()
            ),
            f"mount -o remount,ro,bind {root} && mount -t tmpfs tmpfs {root}/tmp" if read_only else ":",  # noqa: S108 - within the image
            f'exec chroot --userspec={self._user} {root} env -i "$@"',
        ]
        handed = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and "LINKS" not in name}
        handed["PIP_CERT"] = MOUNTED_CERTIFICATES
        settings = [f"{name}={value}" for name, value in (self._environment | handed | dict(more or {})).items()]
        inside = ["/bin/sh", "-c", f'cd {self._directory} && exec "$@"', "sh", *command]
        name_spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", " && ".join(script), "sh"]
        subprocess.run([*name_spaces, *settings, *inside], check=True, stdin=subprocess.DEVNULL)

    def _settings(self) -> Iterator[tuple[str, str]]:
        """This machine's configuration, and where it is mounted: over files and folders of the base."""
        for each in ("/etc/apt", "/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", CERTIFICATES):
            if Path(each).exists():
                at = MOUNTED_CERTIFICATES if each == CERTIFICATES else each
                inside = self._base / at[1:]
                if not inside.exists():
                    inside.touch()
                yield each, at

    def _upper(self, name: str) -> Path:
        return self._folder / f"layer-{name or 'image'}"

    def size(self, stage: Stage) -> str:
        """Return the size that the stage adds to the base image, as `du` counts it."""
        command = ["du", "-sh", str(self._upper(stage.name))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


def core_session(build: Build, image: Stage) -> None:
    """Use the image of `Dockerfile.core` with two playgrounds outside of it."""
    program = str(PROJECT / ".venv/bin/tikv-br")
    with ExitStack() as stack:
        addresses = {}
        for name in ("ONE", "TWO"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            start = [
                program,
                "playground",
                "start",
                "--dir",
                folder,
                "--api-version",
                "v2",
                "--stores",
                "1",
                "--detach",
            ]
            done = subprocess.run([*start, "--output", "json"], check=True, capture_output=True, text=True)
            stack.callback(subprocess.run, [program, "playground", "stop", "--dir", folder], check=True)
            addresses[name] = json.loads(done.stdout.splitlines()[-1])["pd"]
        build.run(image, "/bin/sh", "-c", CORE_SESSION, read_only=True, more=addresses)


def main(arguments: Sequence[str]) -> int:
    """Build and try the image; 0 if all of it works."""
    folder = Path(arguments[0]) if arguments else PROJECT / ".cache" / "container"
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        print("check_container.py: needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    dockerfile = arguments[1] if len(arguments) > 1 else "Dockerfile"
    stages = read_stages((PROJECT / dockerfile).read_text(encoding="utf-8"))
    begin, build = time.monotonic(), Build(folder.resolve())
    build.prepare_base()
    for stage in stages:
        build.run_stage(stage)
    image = stages[-1]
    entry = json.loads(next(each.text for each in image.instructions if each.name == "ENTRYPOINT"))
    build.run(image, *entry, "--version", read_only=True)
    if dockerfile == CORE:
        core_session(build, image)
    else:
        build.run(image, "/bin/sh", "-c", SESSION, read_only=True)
    print(f"the image works; it adds {build.size(image)} to the base; {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
