"""What every ``tikv-br raw`` command begins with: the cluster's options, and a client that connects when it is used."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate

from formats.errors import InvalidKeyText, UnsupportedFormat
from formats.keytext import format_key, parse_key
from tikv_br.cli import options
from tikv_br.cli.options import KeyForm, OutputForm
from tikv_br.cli.output import Output
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.rawkv import RawClient


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """The flags that name a cluster, not looked at yet."""

    pd: list[str]
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    keyspace: str = ""


class RawSession:
    """Output and client of one command. Flags are read first, so that wrong ones answer without a cluster."""

    def __init__(self, flags: ClusterFlags, output: Output, stack: contextlib.ExitStack) -> None:
        self._flags = flags
        self._stack = stack
        self.output = output

    @functools.cached_property
    def client(self) -> RawClient:
        """The client on the cluster and keyspace of the flags. Raises what `Cluster.connect` raises, or `UsageError`."""
        from tikv_br.cluster.cluster import Cluster
        from tikv_br.cluster.config import ClusterConfig

        flags = self._flags
        config = ClusterConfig.from_flags(flags.pd, ca=flags.ca, cert=flags.cert, key=flags.key)
        cluster = self._stack.enter_context(Cluster.connect(config))
        is_id = flags.keyspace.isascii() and flags.keyspace.isdigit()
        keyspace_id = (
            int(flags.keyspace or 0) if is_id or not flags.keyspace else cluster.pd.keyspace_id(flags.keyspace)
        )
        try:
            return cluster.raw(keyspace_id)
        except UnsupportedFormat as error:
            raise UsageError(f"--keyspace: {error}") from None


def read_key(text: str, form: KeyForm, flag: str) -> bytes:
    """Return the key that ``text`` says. Raises `UsageError` naming the flag."""
    try:
        return parse_key(text, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"{flag}: {error}", hint=f"Keys are read as --format {form.value}.") from None


def read_range(start: str, end: str, form: KeyForm) -> tuple[bytes, bytes]:
    """Return the range [start, end), an empty end meaning none. Raises `UsageError` when nothing lies between."""
    first, last = read_key(start, form, "--start"), read_key(end, form, "--end")
    if last and first >= last:
        raise UsageError("--start is not below --end", hint="The range is [start, end); leave --end out for no bound.")
    return first, last


def show(data: bytes, form: KeyForm) -> str:
    """Return bytes as a person can read them in one line: hex where asked for, escaped otherwise."""
    return format_key(data, KeyForm.HEX if form is KeyForm.HEX else KeyForm.ESCAPED)


def raw_command(command: Callable[Concatenate[RawSession, ...], None]) -> Callable[..., None]:
    """Make a function whose first parameter is a `RawSession` a command with the cluster's options in its place."""

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
        output = Output(kwargs.pop("output"))
        flags = ClusterFlags(**{name: kwargs.pop(name) for name in ClusterFlags.__dataclass_fields__})
        with contextlib.ExitStack() as stack:
            command(RawSession(flags, output, stack), **kwargs)
            output.flush()

    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    shared = list(inspect.signature(_cluster_options, eval_str=True).parameters.values())
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *shared]]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _cluster_options(
    pd: options.PdOption = options.DEFAULT_PD,
    ca: options.CaOption = None,
    cert: options.CertOption = None,
    key: options.KeyOption = None,
    keyspace: options.KeyspaceOption = "",
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Carry the options, never called."""
