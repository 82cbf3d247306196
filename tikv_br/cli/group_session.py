"""What the commands of changefeeds and captures begin with: the source cluster and the state of its group."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Concatenate

import typer

from tikv_br.cli import options
from tikv_br.cli.etcd_flags import EtcdFlags
from tikv_br.cli.option_groups import ClusterFlags, session_command
from tikv_br.cli.options import OutputForm
from tikv_br.cli.output import Output

if TYPE_CHECKING:
    from incremental.group.changefeeds import Changefeeds
    from incremental.group.store import GroupStore
    from tikv_br.cluster.cluster import Cluster

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Name of the changefeed.")]


@dataclass(frozen=True, kw_only=True)
class GroupFlags(ClusterFlags, EtcdFlags):
    """The flags that name a cluster and the etcd of its group, and the form of the output."""

    output: options.OutputOption = OutputForm.CONSOLE


class GroupSession:
    """The source, the state of its group, and the output of one command. Nothing is asked before it is used."""

    def __init__(self, flags: GroupFlags, output: Output, stack: contextlib.ExitStack) -> None:
        self.flags = flags
        self.output = output
        self._stack = stack

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The source. Raises `ClusterError`."""
        from tikv_br.cluster.cluster import Cluster

        return self._stack.enter_context(Cluster.connect(self.flags.config()))

    @functools.cached_property
    def store(self) -> GroupStore:
        """What its group keeps. Raises `ClusterError`, `EtcdError`."""
        from incremental.group.store import GroupStore
        from tikv_br.cluster.etcd import Etcd

        cluster_id = self.cluster.cluster_id
        return GroupStore(self._stack.enter_context(Etcd.open(self.flags.etcd_config(self.flags))), cluster_id)

    @property
    def changefeeds(self) -> Changefeeds:
        """What users do to them."""
        from incremental.group.changefeeds import Changefeeds

        return Changefeeds(self.store, self.cluster.pd)


def group_command(command: Callable[Concatenate[GroupSession, ...], None]) -> Callable[..., None]:
    """Make a function whose first parameter is a `GroupSession` a command with the group's options behind its own."""
    return session_command(GroupFlags, _session, command)


@contextlib.contextmanager
def _session(flags: GroupFlags) -> Iterator[GroupSession]:
    flags.etcd_config(flags)  # wrong ones are refused before anything is asked
    output = Output(flags.output)
    with contextlib.ExitStack() as stack:
        yield GroupSession(flags, output, stack)
        output.flush()


def lag(ts: int) -> float:
    """Seconds from a timestamp of PD to now, by this machine's clock."""
    from tikv_br.cluster.timestamp import physical_ms

    return round(time.time() - physical_ms(ts) / 1000, 3)
