"""``tikv-br playground``: start, stop and find development clusters on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tikv_br.cli import kinds, shared
from tikv_br.cli.command import REQUIRED, command, flag
from tikv_br.cli.output import Output
from tikv_br.formats.api_version import ApiVersion

if TYPE_CHECKING:
    from collections.abc import Mapping


class DirectoryFlags(shared.CommandFlags):
    directory: Path = flag(REQUIRED, "Directory of the playground.", "--dir", metavar="DIR")


class PlaygroundFlags(DirectoryFlags):
    """Flags of ``playground start``; None = as before, or the default of a new playground."""

    api_version: Literal["v1", "v1ttl", "v2"] | None = flag(None, "API version (default: v1 for a new playground).")
    tikv_version: str | None = flag(
        None,
        "Version of TiKV and PD to emulate, 5.4 or newer (default: 9.0.0-beta.2 with PD 8.5.2).",
        "--version",
        metavar="X.Y[.Z]",
    )
    stores: int | None = flag(None, "Number of stores (default: 3 for a new playground).", limits=(1, 100))
    replicas: int | None = flag(None, "Replicas per region (default: up to 3).", limits=(1, 100))
    regions: int | None = flag(None, "Split until this many regions contain data (default: 1).", limits=(1, 100_000))
    pd_port: int = flag(0, "Port of PD (0 = the previous one, or any).", "--port", limits=(0, 65535), metavar="PORT")
    pd_members: int | None = flag(
        None, "Members of PD, of which one leads (default: 1).", "--pds", limits=(1, 7), metavar="N"
    )
    region_split_size: int | None = flag(None, "Size above which regions are split (default: 256MiB).", kind=kinds.SIZE)
    election_timeout: float | None = flag(None, "Leader election timeout (default: 10s).", kind=kinds.TIME)
    disconnect_delay: float | None = flag(
        None, "Delay before PD reports a dead store as Disconnected (default: 20s).", kind=kinds.TIME
    )
    keyspaces: list[str] | None = flag(
        None, "Keyspace to create, unless it exists (API V2; may be repeated).", "--keyspace", metavar="NAME[=ID]"
    )
    keyspace_split_delay: float | None = flag(
        None, "Delay before PD pre-splits keyspaces (default: 3s).", kind=kinds.TIME
    )
    resolved_ts_interval: float | None = flag(
        None, "Interval of resolved-ts events in CDC streams (default: 1s).", kind=kinds.TIME
    )
    gc_barriers: bool | None = flag(
        None, "Emulate the GC barriers of newer versions of PD (default: no).", "--gc-barriers/--no-gc-barriers"
    )
    balance: bool | None = flag(None, "Balance leaders automatically (default: yes).", "--balance/--no-balance")
    etcd: bool | None = flag(None, "Start an etcd next to PD (default: no).", "--etcd/--no-etcd")
    ca: str | None = flag(None, "CA certificate (PEM). Enables TLS; needs --cert and --key.", metavar="FILE")
    cert: str | None = flag(None, "Certificate of the servers (PEM).", metavar="FILE")
    key: str | None = flag(None, "Private key of --cert (PEM).", metavar="FILE")
    mutual_tls: bool = flag(False, "Require client certificates.")
    detach: bool = flag(False, "Run in the background.")


@command("playground start", example="--dir /tmp/playground --api-version v2 --detach")
def start(flags: PlaygroundFlags) -> None:
    """Start a new or stopped playground. Its data and settings are kept in its directory."""
    from tikv_br.playground import launcher
    from tikv_br.playground.settings import ServerVersion, Settings, TlsSettings

    changes = flags.values(Settings) | {
        "api_version": None if flags.api_version is None else ApiVersion.from_label(flags.api_version).value,
        "tls": TlsSettings.from_flags(flags.ca, flags.cert, flags.key, mutual=flags.mutual_tls),
    }
    ServerVersion.parse(flags.tikv_version or "")
    chosen = {name: value for name, value in changes.items() if value is not None}
    started = launcher.start(flags.directory, chosen, detached=flags.detach)
    _show(flags.out, started.state)
    if not flags.detach:
        started.wait()


@command("playground stop", example="--dir /tmp/playground")
def stop(flags: DirectoryFlags) -> None:
    """Stop a playground; its data is kept."""
    from tikv_br.playground import launcher

    stopped = launcher.stop(flags.directory)
    text = "stopped" if stopped else f"no playground was running in {flags.directory}"
    flags.out.result("stopped", {"dir": str(flags.directory.absolute()), "stopped": stopped}, text)


@command("playground status", example="--dir /tmp/playground")
def status(flags: DirectoryFlags) -> None:
    """Show whether a playground is running, and its addresses."""
    from tikv_br.playground import launcher

    found = launcher.status(flags.directory)
    if not found["running"]:
        flags.out.result("playground", _fields(found), f"no playground is running in {found['dir']}")
        return
    _show(flags.out, found)


@command("playground list")
def list_running(flags: shared.CommandFlags) -> None:
    """List the running playgrounds of this user."""
    from tikv_br.playground import launcher

    found = launcher.running_playgrounds()
    for each in found:
        flags.out.result("playground", _fields(each))
    rows = [
        (each["pd"], each["api_version"], str(len(each["stores"])), str(each["pid"]), each["dir"]) for each in found
    ]
    flags.out.table(("pd", "api version", "stores", "pid", "dir"), rows, drop=("stores", "pid"))


def _show(out: Output, state: Mapping[str, Any]) -> None:
    stores = "\n".join(f"  store {each['id']}  {each['address']}" for each in state["stores"])
    etcd = f"\n  etcd     {state['etcd']}" if state.get("etcd") else ""
    text = f"PD {state['pd']}  API {state['api_version']}  pid {state['pid']}  {state['dir']}\n{stores}{etcd}"
    out.result("playground", _fields(state), text)
    out.flush()


def _fields(state: Mapping[str, Any]) -> dict[str, object]:
    """A playground in JSON; one that has just started is running and answers."""
    return {
        "dir": state["dir"],
        "running": state.get("running", True),
        "answers": state.get("answers", True),
        "pd": state.get("pd"),
        "stores": state.get("stores"),
        "api_version": state.get("api_version"),
        "tikv_version": state.get("tikv_version"),
        "cluster_id": state.get("cluster_id"),
        "etcd": state.get("etcd"),
        "tls": state.get("tls"),
        "pid": state.get("pid"),
    }
