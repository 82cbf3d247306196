#!/usr/bin/env python3
"""Write docs/exit-codes.md from the classes in tikv_br/errors.py, and the table of versions in docs/compatibility.md.

``generate_exit_codes.py [--check]``
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tikv_br.cluster.versions import CAPABILITIES, Capability
from tikv_br.errors import Failure, TikvBrError

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "exit-codes.md"
VERSIONS = ROOT / "docs" / "compatibility.md"
FIRST, LAST = "<!-- versions: generated -->\n", "<!-- versions: end -->\n"

HEAD = """# Exit codes

Generated from `tikv_br/errors.py` by `scripts/generate_exit_codes.py`; a test fails when it is stale.

Exit code 0 means: everything that was requested is done and, if requested, verified. Everything else is listed here. With
`--output json` the last line on standard output is `{"message_type": "exit_error", "code": …, "name": …, "message": …, "hint": …}`.
*Retry* says whether the same command may succeed a moment later although nothing was changed.

| code | name | what happened | retry | what to do |
|---:|---|---|---|---|
| 0 | | everything that was requested is done | | |
"""


def table() -> str:
    """Return the whole page."""
    rows = []
    for error in sorted(_classes(Failure), key=lambda error: (error.exit_code, error.__name__)):
        what = (error.__doc__ or "").splitlines()[0].rstrip(".") if error is not TikvBrError else "Anything else"
        again = "yes" if error.retryable else ""
        hint = error.default_hint.replace("|", "\\|")
        rows.append(f"| {error.exit_code} | `{error.__name__}` | {what} | {again} | {hint} |")
    return HEAD + "\n".join(rows) + "\n"


def _classes(base: type[Failure]) -> Iterator[type[Failure]]:
    """Yield the classes that errors are raised as: those with an exit code of their own, and the root."""
    if "exit_code" in vars(base):
        yield base
    for child in base.__subclasses__():
        yield from _classes(child)


def versions_page() -> str:
    """Return docs/compatibility.md with the present table between its two comments."""
    head, _, rest = VERSIONS.read_text(encoding="utf-8").partition(FIRST)
    lines = ["| capability of TiKV | used by | first versions | older versions |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.used_by} | {each.versions} | {_older(each)} |" for each in CAPABILITIES]
    return head + FIRST + "\n".join(lines) + "\n" + LAST + rest.partition(LAST)[2]


def _older(capability: Capability) -> str:
    return capability.older or "refused, exit code 5"


def main() -> int:
    """Write both pages, or with --check compare them."""
    stale = []
    for path, text in ((TARGET, table()), (VERSIONS, versions_page())):
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if "--check" in sys.argv[1:]:
        pages = ", ".join(stale) or f"{TARGET.name}, {VERSIONS.name}"
        print(pages, "stale: run scripts/generate_exit_codes.py" if stale else "current")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
