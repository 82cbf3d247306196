"""Pages of the site that are not files below docs/: the project's own pages, and the reference of all commands.

MkDocs calls the functions by their names (mkdocs.yml, ``hooks``).
"""

from __future__ import annotations

import html as html_text
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.generate_man import pages
from tikv_br.cli.command import leaves
from tikv_br.cli.help import records
from tikv_br.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")
"""Shown below ``project/``: docs/ has a README.md of its own."""
UNSEARCHED = ("adr/", "evidence/", "man/")
"""Decisions, evidence, and the same text as the reference of commands: read by few, and in the way of guides."""
_CODE_IN_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_SESSION = re.compile(r'<div class="highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List all decisions in the navigation, by number."""
    pages = [f"adr/{path.name}" for path in sorted((ROOT / "docs/adr").glob("*.md"))]
    for section in config.nav or ():
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and entry.get("Decisions") == "adr/":
                entry["Decisions"] = pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the project's pages and the examples that guides link to, and the reference of commands."""
    for name in PROJECT:
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text(encoding="utf-8")))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    files.append(File.generated(config, "cli.md", content="\n".join(_commands())))
    for name, text in pages():
        files.append(File.generated(config, f"man/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Point links at the place that a file of the repository has on the site; what is not on it becomes plain text."""
    here = page.file.src_uri
    folder = posixpath.dirname(here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}")

    def target(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path in PROJECT:
            path = f"project/{path}"
        elif path == "docs/adr":
            path = f"adr/{min((ROOT / 'docs/adr').glob('*.md')).name}"
        else:
            path = "README.md" if path == "docs" else path.removeprefix("docs/")
        if files.get_file_from_path(path) is None and (ROOT / path).exists():
            return text
        return f"{image}[{text}]({posixpath.relpath(path, posixpath.dirname(here) or '.')}{anchor})"

    if here.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    return _CODE_IN_ROW.sub(lambda row: _CODE.sub(_unescaped, row[0]), _LINK.sub(target, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Let the button of a session copy its commands, without prompts and output."""
    return _SESSION.sub(_with_copy, html)


def _unescaped(code: re.Match[str]) -> str:
    """A pipe needs a backslash in a table on GitHub; in code it would be shown here."""
    return code[0].replace("\\|", "|")


def _with_copy(session: re.Match[str]) -> str:
    lines = html_text.unescape(re.sub(r"<[^>]*>", "", session[1])).splitlines()
    commands, continues = [], False
    for line in lines:
        if line.startswith("$ ") or continues:
            commands.append(line.removeprefix("$ "))
            continues = line.endswith("\\")
    if not commands:
        return session[0]
    copied = html_text.escape("\n".join(commands)).replace("\n", "&#10;")
    return session[0].replace('<div class="highlight">', f'<div class="highlight" data-copy="{copied}">', 1)


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Every command with its options, as `--help-all` shows them. Each option can also be set by its variable or in a"
    yield "[config file](configuration.md). The same as man pages: `scripts/generate_man.py DIR`, or `man/tikv-br.1` and so on below the"
    yield "address of this site.\n"
    for path, command in leaves(typer.main.get_command(app)):
        if command.hidden:
            continue
        context = command.context_class(command, info_name=f"tikv-br {' '.join(path)}")
        yield f"## {context.info_name}\n"
        yield f"{_escaped(command.help or '')}\n"
        rows = [
            f"| `{names.replace('|', chr(92) + '|')}` | {_cell(text)} |"
            for _, names, text in records(command, context, everything=True)
        ]
        yield "\n".join(["| option | |", "|---|---|", *rows, ""])


def _escaped(text: str) -> str:
    return text.replace("\b\n", "").replace("<", "&lt;").strip()


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|").replace("\n", " ")
