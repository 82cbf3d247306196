"""What the commands that look after backups begin with: a storage, opened when it is used, and the output."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate

import typer

from tikv_br.cli import options
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.storage_location import storage_location
from tikv_br.errors import TikvBrError
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.index import Index

_S3_FLAGS = ("endpoint", "region", "storage_class", "sse", "sse_kms_key_id", "acl", "provider", "force_path_style")
_CRYPTER_FLAGS = ("crypter_method", "crypter_key", "crypter_key_file")


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
    return _command(command, RootOption)


def path_command(command: Callable[Concatenate[StorageSession, ...], None]) -> Callable[..., None]:
    """The same for a command whose ``--storage`` is the place of one backup."""
    return _command(command, options.StorageOption)


def _command(command: Callable[Concatenate[StorageSession, ...], None], place: object) -> Callable[..., None]:
    @functools.wraps(command)
    def run(**kwargs: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
        output = Output(kwargs.pop("output"))
        flags = {name: kwargs.pop(f"s3_{name}") for name in _S3_FLAGS}
        flags |= {name: kwargs.pop(name) for name in _CRYPTER_FLAGS}
        command(StorageSession(storage_location(kwargs.pop("storage"), **flags), output), **kwargs)
        output.flush()

    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    shared = [
        parameter.replace(annotation=place) if parameter.name == "storage" else parameter
        for parameter in inspect.signature(_storage_options, eval_str=True).parameters.values()
    ]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *shared]]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def complete_id(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of the index at --storage, for the shell: silent whatever is wrong."""
    storage = context.params.get("storage")
    if not storage:
        return []
    flags = {name: context.params.get(f"s3_{name}") for name in _S3_FLAGS}
    try:
        session = StorageSession(storage_location(str(storage), **flags), Output())
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
RootOption = Annotated[
    str,
    typer.Option(
        "--storage", "-s", envvar="TIKV_BR_STORAGE", metavar="URL", help="The folder or prefix that the backups lie in."
    ),
]


def _storage_options(
    storage: RootOption,
    s3_endpoint: options.S3EndpointOption = None,
    s3_region: options.S3RegionOption = None,
    s3_storage_class: options.S3StorageClassOption = None,
    s3_sse: options.S3SseOption = None,
    s3_sse_kms_key_id: options.S3SseKmsKeyOption = None,
    s3_acl: options.S3AclOption = None,
    s3_provider: options.S3ProviderOption = None,
    s3_force_path_style: options.S3PathStyleOption = None,
    crypter_method: options.CrypterMethodOption = "",
    crypter_key: options.CrypterKeyOption = "",
    crypter_key_file: options.CrypterKeyFileOption = "",
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Carry the options, never called."""
