"""Any failure as one of ours: what its message, hint and exit code are."""

from __future__ import annotations

import typer

from tikv_br.errors import Interrupted, TikvBrError, UsageError


def failure_of(error: BaseException) -> TikvBrError:
    """The error that the command line ends with when ``error`` comes up to it."""
    match error:
        case TikvBrError():
            return error
        case typer.TyperException():
            return _usage_error(error)
        case KeyboardInterrupt() | typer.Abort():
            return Interrupted("interrupted")
        case _:
            return TikvBrError(f"unexpected {type(error).__name__}: {error}")


def _usage_error(error: typer.TyperException) -> UsageError:
    """Our form of what Typer found wrong with the command line."""
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"See `{context.command_path} --help`." if context is not None else None
    return UsageError(error.format_message(), hint=hint)
