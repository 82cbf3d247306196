"""A secret of the command line: as such, by its variable, or in a file."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from tikv_br.errors import UsageError
from tikv_br.storage.secret import SecretText

LARGEST = 1 << 12
log = logging.getLogger(__name__)


def secret_of(flag: str, said: str, file: str) -> SecretText:
    """What a flag or the file of its ``-file`` says, without white space around it; empty = neither. Raises `UsageError`."""
    if said and file:
        raise UsageError(
            f"{flag} is given twice: as such and in a file",
            hint=f"Say one of {flag} and {flag}-file, or set one of their variables.",
        )
    return _read(f"{flag}-file", Path(file)) if file else SecretText(said.strip())


def _read(flag: str, path: Path) -> SecretText:
    try:
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("every user of this machine may read or replace %s: let it be its owner's alone", path)
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8").strip()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path} holds no text") from None
    if not text or len(data) > LARGEST:
        raise UsageError(f"{flag} {path} holds nothing that fits")
    return SecretText(text)
