"""Flags of keys and ranges of keys, and how they are written.

Flags of log archives, and of the time that a restore takes from one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.cli.backup_flags import URLS, StorageFlags
from tikv_br.cli.command import Flags, flag
from tikv_br.cli.output import KeyForm, read_key, read_range
from tikv_br.cli.shared import pd_time
from tikv_br.cluster.timestamps import parse_ts
from tikv_br.errors import BackupSetError, StorageError, UsageError
from tikv_br.formats.keys.codec import successor
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import HEX_MARK, is_hex
from tikv_br.progress_events import Notice, Reporter

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.point_in_time import PointOptions
    from tikv_br.restore.options import RestoreOptions
    from tikv_br.storage.url import StorageLocation


_KEY_FORMAT = partial(
    flag,
    None,
    "How keys are written: text (with \\xNN escapes; what follows hex: is hex), hex, raw (as typed) or escaped (only escapes).",
    show_default="text",
)
KEY_FORMAT = partial(_KEY_FORMAT, "--key-format", "--format")
KEY_FORMAT_ALONE = partial(_KEY_FORMAT, "--key-format")
"""Help for ``--format`` in commands where it has more values."""
START = partial(flag, "", "Start of the range (inclusive; empty: no bound).", metavar="KEY")
END = partial(flag, "", "End of the range (exclusive; empty: no bound).", metavar="KEY")


class KeyFormatFlags(Flags):
    key_format: KeyForm | None = KEY_FORMAT()

    @property
    def form(self) -> KeyForm:
        """The form of keys."""
        return self.key_format or KeyForm.TEXT


class KeyAndValueFormatFlags(KeyFormatFlags):
    value_format: KeyForm | None = flag(
        None, "Format of the value.", show_default="as --key-format; raw if that is text"
    )

    @property
    def value_form(self) -> KeyForm:
        """The form of values: as they are, unless one was asked for."""
        return self.value_format or (KeyForm.RAW if self.form is KeyForm.TEXT else self.form)


class RangeFlags(KeyFormatFlags):
    start: str = START()
    end: str = END()
    key_format: KeyForm | None = KEY_FORMAT()

    def key_range(self) -> KeyRange:
        """The range of user keys. Raises `UsageError`."""
        return read_range(*self.bounds(), self.form)

    def notice(self, reporter: Reporter) -> None:
        """Report keys that are hex as well, in commands that read keys as hex before."""
        notice_ambiguous(reporter, self.key_format, zip(("--start", "--end"), self.bounds(), strict=True))

    def bounds(self) -> tuple[str, str]:
        """Start and end as they are written. Raises `UsageError`."""
        return self.start, self.end


class OneRangeFlags(RangeFlags):
    """One range of keys, as ``--range`` or as ``--start`` and ``--end``."""

    span: str = flag(
        "",
        "Key range: START (inclusive) to END (exclusive); either may be empty; a colon of a key is \\x3a.",
        "--range",
        metavar="START:END",
    )

    def bounds(self) -> tuple[str, str]:
        """As `RangeFlags.bounds`."""
        if not self.span:
            return self.start, self.end
        if self.start or self.end:
            raise UsageError("--range cannot be combined with --start and --end", hint="Pass one of them.")
        return split_range(self.span, self.form)


class RangeOrPrefixFlags(OneRangeFlags):
    """One range of keys, also as ``--prefix``."""

    prefix: str = flag("", "Only keys with this prefix, instead of a range.", metavar="KEY")

    def key_range(self) -> KeyRange:
        """As `RangeFlags.key_range`."""
        if not self.prefix:
            return super().key_range()
        if any(self.bounds()):
            raise UsageError("--prefix cannot be combined with a range", hint="Pass one of them.")
        key = read_key(self.prefix, self.form, "--prefix")
        return KeyRange(key, successor(key))

    def notice(self, reporter: Reporter) -> None:
        """As `RangeFlags.notice`."""
        super().notice(reporter)
        notice_ambiguous(reporter, self.key_format, [("--prefix", self.prefix)])


def notice_ambiguous(reporter: Reporter, form: KeyForm | None, texts: Iterable[tuple[str, str]]) -> None:
    """Report keys that are read as text although they are hex as well, by flag, unless a form was asked for."""
    for name, text in texts:
        if form is None and is_hex(text):
            reporter(Notice(f"{name} {text}: read as the text {text}; if it is hex, pass {HEX_MARK}{text}"))


class RangesFlags(KeyFormatFlags):
    """Ranges of keys, as ``--start`` and ``--end`` or as ``--range``, and as ``--prefix``."""

    start: str = START()
    end: str = END()
    key_format: KeyForm | None = KEY_FORMAT_ALONE()
    ranges: list[str] | None = flag(
        None,
        "Key range: START (inclusive) to END (exclusive); either may be empty; a colon of a key is \\x3a (may be repeated).",
        "--range",
        metavar="START:END",
    )
    prefixes: list[str] | None = flag(
        None, "Prefix of keys, a range of its own (may be repeated).", "--prefix", metavar="KEY"
    )

    def key_ranges(self) -> tuple[KeyRange, ...]:
        """The ranges of user keys; none = no bound was given. Raises `UsageError`."""
        if (self.start or self.end) and self.ranges:
            raise UsageError("--start and --end cannot be combined with --range", hint="Pass all ranges with --range.")
        texts = [("--start", "--end", (self.start, self.end))] if self.start or self.end else []
        texts += [("--range", "--range", pair) for pair in self._texts()]
        ranges = [
            KeyRange(read_key(first, self.form, of_first), read_key(last, self.form, of_last))
            for of_first, of_last, (first, last) in texts
        ]
        keys = [read_key(each, self.form, "--prefix") for each in self.prefixes or ()]
        return (*ranges, *(KeyRange(key, successor(key)) for key in keys))

    def notice(self, reporter: Reporter) -> None:
        """As `RangeFlags.notice`."""
        texts = [("--start", self.start), ("--end", self.end)]
        texts += [("--range", key) for pair in self._texts() for key in pair]
        texts += [("--prefix", each) for each in self.prefixes or ()]
        notice_ambiguous(reporter, self.key_format, texts)

    def _texts(self) -> Iterator[tuple[str, str]]:
        return (split_range(text, self.form) for text in self.ranges or ())


_RANGE = re.compile(r"(hex:[^:]*|[^:]*):(hex:[^:]*|[^:]*)")


def split_range(text: str, form: KeyForm) -> tuple[str, str]:
    """START and END of ``START:END``; the colon of ``hex:`` belongs to the key. Raises `UsageError`."""
    if form is KeyForm.TEXT:
        found = _RANGE.fullmatch(text)
        first, last = found.groups() if found is not None else ("hex", "")
        colon = first != "hex"  # of hex:6b, which has no end
    else:
        first, colon, last = text.partition(":")
    if not colon or ":" in last.removeprefix(HEX_MARK):
        raise UsageError(
            f"--range {text!r} is not START:END", hint=r"Write a colon of a key as \x3a, and a key in hex as hex:…"
        )
    return first, last


ALLOW_INEXACT = partial(
    flag,
    False,
    "Accept a time at which the log lacks versions, because the CDC stream was interrupted: keys that were overwritten then may get "
    "an older value, or be missing.",
)
LOG_ID = partial(
    flag,
    None,
    "Name of the log archive (see `tikv-br log start --log-id`).",
    metavar="NAME",
    show_default="default",
)


class LogSourceFlags(Flags):
    log: str = flag("", f"Log archive to use with the backup: {URLS}.", metavar="URL")
    log_id: str | None = LOG_ID()

    def source(self, storage: StorageFlags) -> LogSource | None:
        """The log, if there is one. Raises as `choose_log`."""
        if not self.log:
            return None
        from tikv_br.archive.maintenance import choose_log

        return choose_log(storage.locate(self.log), self.log_id)


def parse_ts_or_latest(text: str, name: str, now: Callable[[], float] = time.time) -> int:
    """As `parse_ts`; 0 = ``latest``. Raises `UsageError`."""
    return 0 if text == "latest" else parse_ts(text, name, now)


class PointFlags(Flags):
    until: str = flag(
        "",
        "Restore the data as of this time (API V2): latest, a PD timestamp, a time or an age (default: latest with --log or an "
        "incremental backup, else the backup as it is).",
        "--until",
        "--restore-ts",
        metavar="TS|TIME|latest",
    )
    before: str = flag(
        "",
        "As the time to restore to, but no write made at this time or later is included: the rows of 3 s before, as stores give out "
        "timestamps up to 3 s old.",
        metavar="TS|TIME",
    )
    allow_inexact: bool = ALLOW_INEXACT()
    work_storage: str = flag(
        "",
        "URL for the temporary merged backup, which needs the space of a full backup (default: next to the log or, without one, to the "
        "backup).",
        metavar="URL",
    )

    def time(self, cluster: ClusterConfig) -> int:
        """The timestamp of ``--until`` or ``--before``; 0 = the latest. Raises `UsageError`, `ClusterError`."""
        now = partial(pd_time, cluster)
        if self.before:
            return parse_ts(self.before, "--before", now)
        return parse_ts_or_latest(self.until or "latest", "--until", now)

    def options(
        self, restore: RestoreOptions, log: LogSource | None, storage_flags: StorageFlags
    ) -> PointOptions | None:
        """None if the backup is restored as it is: without a time and a log, and if it is not incremental. Raises `UsageError`, `ClusterError`."""
        if not self.until + self.before and log is None and not _is_increment(restore.storage):
            return None
        if self.before and self.until != type(self).until:
            raise UsageError("--until and --before cannot be combined", hint="Pass one of them.")
        ts = self.time(restore.cluster)
        before = ts if self.before else 0
        from tikv_br.point_in_time import PointOptions, just_before

        work = storage_flags.locate(self.work_storage) if self.work_storage else None
        return PointOptions(restore, log, just_before(before) if before else ts, before, self.allow_inexact, work)


class RequiredPointFlags(PointFlags):
    until: str = flag(
        "latest",
        "Time to restore to: latest, a PD timestamp, a time or an age.",
        "--until",
        "--restored-ts",
        metavar="TS|TIME|latest",
    )


def _is_increment(storage: StorageLocation) -> bool:
    """Whether a backup is incremental; False if it cannot be read, which the restore reports."""
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.storage.open import open_store

    try:
        return BackupSet.open(open_store(storage)).is_increment
    except (BackupSetError, StorageError):
        return False
