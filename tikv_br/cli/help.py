"""Groups of options in help, the options that only ``--help-all`` shows, and the text of both.

An option is in the typer panel (``rich_help_panel``) of its name, and ``hidden`` if only ``--help-all`` shows it. An option without a
help text is never shown: it was removed, and exists only for its error message.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

ALL = "--help-all"
PANELS = ("Arguments", "What", "Where", "How", "TLS", "Storage", "Spark", "Output")
"""The groups of options, in the order of help."""

_PANEL_OF = {
    "Storage": "s3.* gcs.* azblob.* crypter.* storage-patience send-credentials-to-tikv",
    "TLS": "ca cert key *-ca *-cert sink-key other-key target-key etcd-key mutual-tls",
    "Spark": "executor spark-*",
    "Output": "output config log-level log-file log-format quiet report nagios origin help",
    "What": "start end range prefix all format key-format value-format keyspace to-keyspace rewrite-prefix before since until "
    "from from-backup from-backup-ts start-ts base backup scenario level subset seed view limit keep-[!t]* input "
    "input-* key-column value-column ttl-column expiry-column order-column csv-* full-backup-storage count value-size ttl with-ttl encoding "
    "exact keys within file-format include-foreign restores",
    "Where": "storage pd other-* sink target target-* work-storage staging log log-id id state state-dir etcd etcd-* reports dir "
    "work-dir scratch-dir listen status drills status-addr status-key-file no-status-key group bad-rows metrics-file textfile "
    "port for",
}
"""Names of options by group, as patterns; the first group that fits counts, and all others are ``How``."""
_ADVANCED = {
    # crypter.ke[y] is the flag without those that begin so; written out, `redaction` would take the next word for a key.
    "": "cert key skip-version-check s3.* gcs.* azblob.* crypter.[!k]* crypter.ke[y] storage-patience send-credentials-to-tikv executor spark-* config "
    "log-level log-file log-format quiet etcd-* sink-ca sink-cert sink-key sink-concurrency sink-batch-size sink-backoff "
    "sink-patience kafka-patience take-over allow-incomplete heartbeat-url-file textfile other-ca other-cert other-key target-ca target-cert target-key checkpoint-every scratch-dir "
    "sorter-memory status-every status-key-file no-status-key max-lag hold-back gc-ttl lock-wait lock-patience compression compression-level "
    "file-size safe-interval assume-no-ttl allow-empty allow-inexact allow-loss allow-followers work-storage region-size import-mode file-check "
    "via restamp state concurrency seed from-backup-ts no-resume resume",
    "backup": "engine file-format format",
    "backup raw": "start end",
    "diff": "other-keyspace start end keys",
    "drill run": "until keyspace dst-api-version start end key-format max-age min-keys cut-over within compare-source target-stores work-dir "
    "tail-lag tail-patience keep-last webhook-url webhook-url-file on-end",
    "load": "checksum input-option csv-delimiter csv-escape csv-null csv-quote encoding value-encoding expiry-column order-column partitions keep-staging",
    "log": "flush-size",
    "log start": "state-dir etcd",
    "playground": "pds region-split-size election-timeout disconnect-delay keyspace-split-delay resolved-ts-interval gc-barriers balance "
    "mutual-tls",
    "restore": "mode start end",
    "restore point": "range key-format",
    "restore raw": "before range key-format report",
    "sync": "interval exact-every etcd",
}
"""Options that only ``--help-all`` shows: of all commands, and of those whose names begin with these words."""
_SHOWN = {
    "changefeed update": "sink-concurrency sink-batch-size sink-backoff sink-patience sorter-memory hold-back gc-ttl",
    "changefeed capture": "scratch-dir",
    "raw": "concurrency seed",
}
"""Options that ``--help`` shows after all."""


def panel_of(name: str) -> str:
    """The group of an option, by its name without dashes."""
    return next((panel for panel, patterns in _PANEL_OF.items() if _fits(name, patterns)), "How")


def is_advanced(path: Sequence[str], name: str) -> bool:
    """Whether only ``--help-all`` shows this option of a command."""

    def names_it(table: dict[str, str]) -> bool:
        return any(
            f"{' '.join(path)} ".startswith(f"{words} " if words else "") and _fits(name, patterns)
            for words, patterns in table.items()
        )

    return names_it(_ADVANCED) and not names_it(_SHOWN)


def _fits(name: str, patterns: str) -> bool:
    words, wild = _split(patterns)
    return name in words or any(fnmatchcase(name, pattern) for pattern in wild)


@functools.cache
def _split(patterns: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names, which most patterns are, and the rest."""
    words = patterns.split()
    wild = tuple(each for each in words if not each.replace("-", "").replace(".", "").isalnum())
    return frozenset(words) - frozenset(wild), wild


def present_names(option: TyperOption) -> list[str]:
    """The names of an option without old spellings: the long ones after the first, which work, with variables and config keys."""
    first = next(name for name in option.opts if name.startswith("--"))
    return [name for name in option.opts if name == first or not name.startswith("--")]


def shows_all(context: typer.Context) -> bool:
    """Whether ``--help-all`` was asked for."""
    return bool(context.meta.get(ALL))


def note_all(context: typer.Context, arguments: list[str]) -> list[str]:
    """Note whether ``--help-all`` is among the arguments, and return them with ``--help`` in its place."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    context.meta[ALL] = ALL in arguments[:end]
    return ["--help" if each == ALL else each for each in arguments[:end]] + arguments[end:]


def records(command: TyperCommand, context: typer.Context, *, everything: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the group, the names and the help of each argument and option that is shown.

    With `everything` also of those that ``--help`` leaves out, with environment variables.
    """
    for param in command.params:
        shown = copy.copy(param)
        if isinstance(shown, TyperOption):
            shown.hidden = not shown.help or (shown.hidden and not everything)
            shown.opts = present_names(shown)
            shown.show_envvar = everything
            shown.envvar = shown.envvar[0] if isinstance(shown.envvar, list) else shown.envvar
        record = shown.get_help_record(context)
        if record is not None:
            names = record[0] if isinstance(shown, TyperOption) else str(shown.metavar)
            yield getattr(shown, "rich_help_panel", None) or PANELS[0], names, record[1]


def write_options(command: TyperCommand, context: typer.Context, formatter: Any) -> None:  # noqa: ANN401 - public Typer has no type
    """Write the groups of options, and where the rest is."""
    everything = shows_all(context)
    found = list(records(command, context, everything=everything))
    found.append(
        ("Output", "-h, --help", f"Show this message and exit; {ALL} shows all options and environment variables.")
    )
    for panel in PANELS:
        rows = [(names, text) for title, names, text in found if title == panel]
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows)
    hidden = [param for param in command.params if isinstance(param, TyperOption) and param.hidden and param.help]
    if hidden and not everything:
        groups = [panel for panel in PANELS if any(param.rich_help_panel == panel for param in hidden)]
        storage = " `tikv-br help storage` shows those of storage." if "Storage" in groups else ""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"{ALL} shows {len(hidden)} more options ({', '.join(groups)}).{storage}")
