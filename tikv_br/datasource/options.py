"""The options of the data sources as values. Errors name the option; secrets come from files and the environment only."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyspark import SparkContext

from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.timestamps import parse_ts
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.formats.errors import InvalidKeyText
from tikv_br.formats.keys.codec import successor
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.text import FORMS, parse_key
from tikv_br.storage.crypter import Crypter, SecretText, read_secret
from tikv_br.storage.url import CloudFlags, S3Options, StorageLocation, parse
from tikv_br.tasks.settings import is_local

_KEY_FILE_VARIABLE, _KEY_VARIABLE = "TIKV_BR_CRYPTER_KEY_FILE", "TIKV_BR_CRYPTER_KEY"
_SECRETS = {
    "crypter_key": f"Pass crypter_key_file, or set {_KEY_VARIABLE} for the driver: options are visible in Spark's pages and logs.",
}


@contextlib.contextmanager
def with_hints() -> Iterator[None]:
    """Add the hint of an error to what Spark shows of it: the traceback."""
    try:
        yield
    except TikvBrError as error:
        error.add_note(f"Hint: {error.hint}")
        raise


def use_this_python() -> None:
    """Make the workers of a local session run this Python, which has tikv-br, unless ``PYSPARK_PYTHON`` names another.

    Spark would start the first ``python3`` of the PATH, which is another one if a script runs without an activated environment.
    PySpark calls this by way of a source's name, right before it notes the Python of a source that is registered.
    """
    context = SparkContext._active_spark_context  # noqa: SLF001 - no public way asks without starting one
    if context is not None and is_local(context.master or "") and not os.environ.get("PYSPARK_PYTHON"):
        context.pythonExec = sys.executable


KEY_OPTIONS = ("keyspace", "start", "end", "prefix", "key_format")
CRYPTER_OPTIONS = ("crypter_method", "crypter_key_file", "crypter_allow_unproven")


class Options:
    """Options passed to ``.option``. Raises `UsageError` for names not among ``known``; all methods do for invalid values."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        for name in sorted(self._given.keys() - set(known)):
            hint = _SECRETS.get(name, f"Options: {', '.join(known)}.")
            raise UsageError(f"unknown option {name!r}", hint=hint)

    def text(self, name: str) -> str:
        """The text of an option; empty if it is not there."""
        return self._given.get(name, "")

    def flag(self, name: str) -> bool:
        """Return whether an option is ``true``; it may also be ``false`` or missing."""
        text = self.text(name).lower()
        if text not in {"", "true", "false"}:
            raise UsageError(f"option {name} is {self.text(name)!r}", hint="Pass true or false.")
        return text == "true"

    def number(self, name: str, default: int) -> int:
        text = self.text(name) or str(default)
        if not (text.isascii() and text.isdigit() and int(text)):
            raise UsageError(f"option {name} is {text!r}", hint="Pass a whole number above 0.")
        return int(text)

    def keys(self) -> tuple[KeyRange, ...]:
        """The user keys that ``start``, ``end`` and ``prefix`` select: one range, whose empty end is no end, or none."""
        start, end, prefix = (self._key(name) for name in ("start", "end", "prefix"))
        if end and start >= end:
            raise UsageError("option start is not less than option end", hint="The range is [start, end).")
        wanted = intersection(KeyRange(start, end), KeyRange(prefix, successor(prefix)))
        return () if wanted.is_empty else (wanted,)

    def _key(self, name: str) -> bytes:
        form = self.text("key_format") or "raw"
        if form not in FORMS:
            raise UsageError(f"option key_format is {form!r}", hint=f"Pass {', '.join(FORMS)}.")
        try:
            return parse_key(self.text(name), form)
        except InvalidKeyText as error:
            raise UsageError(f"option {name}: {error}", hint=f"Keys are parsed as key_format {form}.") from None

    def cluster(self) -> ClusterConfig:
        """The cluster of ``pd``, ``ca``, ``cert`` and ``key``."""
        if not self.text("pd"):
            raise UsageError("option pd is missing", hint="Pass PD's addresses: host:port[,host:port...].")
        ca, cert, key = (self.text(name) or None for name in ("ca", "cert", "key"))
        return ClusterConfig.from_flags(self.text("pd"), ca=ca, cert=cert, key=key)

    def ts(self, name: str) -> int | None:
        """A PD timestamp, or a time with its offset from UTC; None = ``latest``, 0 = missing."""
        text = self.text(name)
        if text.lower() == "latest":
            return None
        return parse_ts(text, f"option {name}") if text else 0

    def storage(self, name: str = "path") -> StorageLocation:
        """The storage at an option's URL, with the key of ``crypter_key_file`` or of the environment, if there is one."""
        if not self.text(name):
            hint = 'Pass it to load: .load("s3://bucket/prefix?region=…").' if name == "path" else "Pass its URL."
            raise UsageError(
                "the backup's URL is missing" if name == "path" else f"option {name} is missing", hint=hint
            )
        location = parse(self.text(name), CloudFlags(S3Options(ca=os.environ.get("AWS_CA_BUNDLE", ""))))
        if location.has_secrets:
            raise UsageError(
                f"the URL of {location} contains credentials, which Spark would show in its pages and logs",
                hint="Leave them out: the credentials of the environment are used (AWS: environment, profile, role; Azure: variables, identity).",
            )
        unproven = self.flag("crypter_allow_unproven")
        return replace(
            location, crypter=Crypter.of(self.text("crypter_method"), *self._crypter_keys(), unproven=unproven)
        )

    def _crypter_keys(self) -> list[SecretText]:
        if paths := self.text("crypter_key_file"):
            return [read_secret("crypter_key_file", Path(path.strip())) for path in paths.split(",")]
        if paths := os.environ.get(_KEY_FILE_VARIABLE, ""):
            return [read_secret(_KEY_FILE_VARIABLE, Path(path)) for path in paths.split()]
        return [SecretText(os.environ.get(_KEY_VARIABLE, "").strip())]
