"""``tikv-br playground``: start, stop and find development clusters on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from formats.api_version import ApiVersion
from tikv_br.cli.options import OutputForm, OutputOption, parse_duration, parse_size
from tikv_br.cli.output import Output
from tikv_br.errors import Interrupted, PlaygroundError, Terminated, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

app = typer.Typer(rich_markup_mode=None, help="Run a development cluster on this machine.", no_args_is_help=True)

DirectoryOption = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The playground's folder.")]
TlsFileOption = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file of the servers' TLS.")]


@app.command("start")
def start(
    directory: DirectoryOption,
    api_version: Annotated[Literal["v1", "v1ttl", "v2"] | None, typer.Option(help="v1 for a new one.")] = None,
    stores: Annotated[int | None, typer.Option(min=1, help="Number of stores; 3 for a new one.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Voters of a region; up to 3 as stores allow.")] = None,
    regions: Annotated[int | None, typer.Option(min=1, help="Split until so many regions hold data.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="PD's port; 0: the same as before, or any.")] = 0,
    region_split_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Split regions above this.")] = None,
    election_timeout: Annotated[str | None, typer.Option(metavar="TIME", help="A dead leader's time.")] = None,
    keyspace_split_delay: Annotated[str | None, typer.Option(metavar="TIME", help="Until PD's own splits.")] = None,
    resolved_ts_interval: Annotated[str | None, typer.Option(metavar="TIME", help="Of change feeds.")] = None,
    gc_barriers: Annotated[bool | None, typer.Option("--gc-barriers/--no-gc-barriers", help="As newer PDs.")] = None,
    balance: Annotated[bool | None, typer.Option("--balance/--no-balance", help="Spread leaders by itself.")] = None,
    etcd: Annotated[bool | None, typer.Option("--etcd/--no-etcd", help="A real etcd beside it.")] = None,
    ca: TlsFileOption = None,
    cert: TlsFileOption = None,
    key: TlsFileOption = None,
    mutual_tls: Annotated[bool, typer.Option("--mutual-tls", help="Demand certificates of clients.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running and return.")] = False,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Start a playground, a new one or one that was stopped; data and settings are kept in its folder."""
    from tikv_br.playground import launcher

    changes: dict[str, Any] = {
        "api_version": None if api_version is None else ApiVersion.from_label(api_version).value,
        "stores": stores,
        "replicas": replicas,
        "regions": regions,
        "pd_port": port,
        "region_split_size": None if region_split_size is None else parse_size(region_split_size),
        "election_timeout": None if election_timeout is None else parse_duration(election_timeout),
        "keyspace_split_delay": None if keyspace_split_delay is None else parse_duration(keyspace_split_delay),
        "resolved_ts_interval": None if resolved_ts_interval is None else parse_duration(resolved_ts_interval),
        "gc_barriers": gc_barriers,
        "balance": balance,
        "etcd": etcd,
        "tls": _tls(ca, cert, key, mutual=mutual_tls),
    }
    chosen = {name: value for name, value in changes.items() if value is not None}
    started = launcher.start(directory, chosen, detached=detach)
    _show(Output(output), started.state)
    if not detach:
        _wait(started, directory)


@app.command("stop")
def stop(directory: DirectoryOption, output: OutputOption = OutputForm.CONSOLE) -> None:
    """End the playground of a folder; its data stay."""
    from tikv_br.playground import launcher

    stopped = launcher.stop(directory)
    text = "stopped" if stopped else f"no playground ran in {directory}"
    Output(output).result("stopped", {"dir": str(directory.absolute()), "stopped": stopped}, text)


@app.command("status")
def status(directory: DirectoryOption, output: OutputOption = OutputForm.CONSOLE) -> None:
    """Say whether the playground of a folder runs and answers, and where."""
    from tikv_br.playground import launcher

    found = launcher.status(directory)
    if not found["running"]:
        Output(output).result("playground", _fields(found), f"no playground runs in {found['dir']}")
        return
    _show(Output(output), found)


@app.command("list")
def list_running(output: OutputOption = OutputForm.CONSOLE) -> None:
    """List this user's running playgrounds."""
    from tikv_br.playground import launcher

    out = Output(output)
    found = launcher.running()
    for each in found:
        out.result("playground", _fields(each))
    rows = [
        (each["pd"], each["api_version"], str(len(each["stores"])), str(each["pid"]), each["dir"]) for each in found
    ]
    out.table(("pd", "api version", "stores", "pid", "dir"), rows)


def _show(out: Output, state: Mapping[str, Any]) -> None:
    stores = "\n".join(f"  store {each['id']}  {each['address']}" for each in state["stores"])
    etcd = f"\n  etcd     {state['etcd']}" if state.get("etcd") else ""
    text = f"PD {state['pd']}  API {state['api_version']}  pid {state['pid']}  {state['dir']}\n{stores}{etcd}"
    out.result("playground", _fields(state), text)
    out.flush()


def _fields(state: Mapping[str, Any]) -> dict[str, object]:
    """A playground as a JSON line tells it; one that has just started runs and answers."""
    return {
        "dir": state["dir"],
        "running": state.get("running", True),
        "answers": state.get("answers", True),
        "pd": state.get("pd"),
        "stores": state.get("stores"),
        "api_version": state.get("api_version"),
        "cluster_id": state.get("cluster_id"),
        "etcd": state.get("etcd"),
        "tls": state.get("tls"),
        "pid": state.get("pid"),
    }


def _wait(started: Any, directory: Path) -> None:  # noqa: ANN401 - launcher.Started, not imported for its weight
    """Stay until the playground ends, or is ended by a signal to us."""
    from tikv_br.playground import launcher

    try:
        code = started.process.wait()
    except (Interrupted, Terminated):
        launcher.stop(directory)
        started.process.wait()
        return
    if code != 0:
        raise PlaygroundError(f"the playground in {directory} ended with code {code}")


def _tls(ca: str | None, cert: str | None, key: str | None, *, mutual: bool) -> object:
    from tikv_br.playground.settings import TlsSettings

    files = [file for file in (ca, cert, key) if file is not None]
    if not files:
        return None
    if ca is None or cert is None or key is None:
        raise UsageError("--ca, --cert and --key belong together", hint="Give all three, or none.")
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise UsageError(f"no such file: {missing[0]}")
    ca, cert, key = (str(Path(file).absolute()) for file in files)
    return TlsSettings(ca, cert, key, mutual)
