"""What the commands that look after backups begin with: a storage, opened when it is used, and the output."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Concatenate

import typer

from tikv_br.cli import options
from tikv_br.cli.option_groups import session_command
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.storage_flags import S3Flags, StorageFlags
from tikv_br.errors import TikvBrError
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.index import Index

RootOption = Annotated[
    str,
    typer.Option(
        "--storage", "-s", envvar="TIKV_BR_STORAGE", metavar="URL", help="The folder or prefix that the backups lie in."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFlags(StorageFlags):
    """A folder of backups, and the form of the output."""

    storage: RootOption
    output: options.OutputOption = OutputForm.CONSOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFlags(RootFlags):
    """The place of one backup, and the form of the output."""

    storage: options.StorageOption


@dataclass(frozen=True, slots=True)
class StorageSession:
    """The place of ``--storage`` and the output of one command."""

    location: StorageLocation
    output: Output

    def index(self) -> Index:
        """The index of which the place is the root."""
        from tikv_br.backupset.index import Index
        from tikv_br.storage.open import open_store

        return Index(open_store(self.location))

    def backup(self, backup_id: str = "") -> BackupSet:
        """The backup with that id in the index at the place; without an id, the one at the place itself."""
        from tikv_br.backupset.backup_set import BackupSet
        from tikv_br.storage.open import open_store

        if not backup_id:
            return BackupSet.open_any(open_store(self.location))
        index = self.index()
        return BackupSet.open_any(index.store_of(index.find(backup_id).entry.path))


def storage_command(command: Callable[Concatenate[StorageSession, ...], None]) -> Callable[..., None]:
    """Make a function whose first parameter is a `StorageSession` a command with the storage's options in its place."""
    return session_command(RootFlags, _session, command)


def path_command(command: Callable[Concatenate[StorageSession, ...], None]) -> Callable[..., None]:
    """The same for a command whose ``--storage`` is the place of one backup."""
    return session_command(PathFlags, _session, command)


@contextlib.contextmanager
def _session(flags: RootFlags) -> Iterator[StorageSession]:
    output = Output(flags.output)
    yield StorageSession(flags.locate(flags.storage), output)
    output.flush()


def complete_id(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of the index at --storage, for the shell: silent whatever is wrong."""
    storage = context.params.get("storage")
    if not storage:
        return []
    flags = S3Flags(**{field.name: context.params.get(field.name) for field in dataclasses.fields(S3Flags)})
    try:
        session = StorageSession(flags.locate(str(storage)), Output())
        return sorted(found for found in session.index().ids() if found.startswith(incomplete))
    except TikvBrError:
        return []


def utc(milliseconds: int) -> str:
    """A time for people, in UTC and to the second; ``-`` when it is not known."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(milliseconds // 1000)) if milliseconds else "-"


IdArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="The backup's id in `list`, or its beginning.", autocompletion=complete_id),
]
