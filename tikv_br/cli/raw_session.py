"""What every ``tikv-br raw`` command begins with: the cluster's options, and a client that connects when it is used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate

from formats.errors import UnsupportedFormat
from tikv_br.cli import options
from tikv_br.cli.option_groups import ClusterFlags, session_command
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.rawkv import RawClient


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFlags(ClusterFlags):
    """The flags that name a cluster and a keyspace of it, and the form of the output."""

    keyspace: options.KeyspaceOption = ""
    output: options.OutputOption = OutputForm.CONSOLE


class RawSession:
    """Output and client of one command. Flags are read first, so that wrong ones answer without a cluster."""

    def __init__(self, flags: RawFlags, output: Output, stack: contextlib.ExitStack) -> None:
        self._flags = flags
        self._stack = stack
        self.output = output

    @functools.cached_property
    def client(self) -> RawClient:
        """The client on the cluster and keyspace of the flags. Raises what `Cluster.connect` raises, or `UsageError`."""
        from tikv_br.cluster.cluster import Cluster

        flags = self._flags
        cluster = self._stack.enter_context(Cluster.connect(flags.config()))
        try:
            return cluster.raw(cluster.pd.keyspace_id(flags.keyspace))
        except UnsupportedFormat as error:
            raise UsageError(f"--keyspace: {error}") from None


def raw_command(command: Callable[Concatenate[RawSession, ...], None]) -> Callable[..., None]:
    """Make a function whose first parameter is a `RawSession` a command with the cluster's options in its place."""
    return session_command(RawFlags, _session, command)


@contextlib.contextmanager
def _session(flags: RawFlags) -> Iterator[RawSession]:
    output = Output(flags.output)
    with contextlib.ExitStack() as stack:
        yield RawSession(flags, output, stack)
        output.flush()
