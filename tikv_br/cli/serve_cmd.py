"""``tikv-br serve``: a local web page of backups, log archives, syncs, drills and garbage collection."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tikv_br import signals
from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import command, flag
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.serve.findings import OverviewLimits
    from tikv_br.serve.watcher import Sources
    from tikv_br.storage.crypter import SecretText

log = logging.getLogger(__name__)
SHORTEST_REFRESH = 1.0


class ShownClusterFlags(shared.ClusterFlags):
    pd: list[str] = shared.pd("PD endpoints of the cluster whose safe points to show.", default=())


class ServeFlags(shared.CommandFlags):
    storage: list[str] = backup_flags.storage(
        "Parent URL of backups to show, as for `tikv-br list` (may be repeated).", default=[]
    )
    log: list[str] = flag(
        [], "Log archive to show: URL, with ?id=NAME unless its name is default (may be repeated).", metavar="URL"
    )
    status: list[str] = flag(
        [],
        "Status address to show, the --status-addr of `sync`, `log start` or `changefeed capture` (may be repeated).",
        metavar="[http://]HOST:PORT",
    )
    status_key_file: str = flag(
        "",
        "File with the bearer token of the status addresses (default: ~/.local/state/tikv-br/status.key if it exists).",
        metavar="FILE",
    )
    drills: list[str] = flag(
        [],
        "Directory or URL with reports of drills to show, as --reports of `drill run` (may be repeated).",
        metavar="URL",
    )
    cluster: ShownClusterFlags
    listen: str = flag(
        "127.0.0.1:8390",
        "Address to serve the page at. Other machines can only connect with a token.",
        metavar="[HOST:]PORT",
    )
    token: str = flag(
        "",
        "Token to log in with. Prefer --token-file or the environment variable: flags are visible in `ps`.",
        metavar="TEXT",
    )
    token_file: str = flag("", "File with the token to log in with.", metavar="FILE")
    refresh: float = flag("30s", "Time between two reads of a source.", kind=kinds.TIME)
    max_lag: float = flag("5m", "Lag above which a log archive needs attention.", kind=kinds.TIME)
    max_backup_age: list[str] = flag(
        ["30h"],
        "Age above which the newest backup of a --storage needs attention (0 = none), or of the backups whose path "
        "or URL begins with PREFIX (may be repeated).",
        metavar="[PREFIX=]DURATION",
    )
    storage_flags: backup_flags.StorageFlags

    def sources(self) -> Sources:
        """Return the sources to show. Raises `UsageError`."""
        if not (self.storage or self.log or self.status or self.drills or self.cluster.pd):
            raise UsageError(
                "there is nothing to show", hint="Pass at least one of --storage, --log, --status, --drills and --pd."
            )
        storages = [self.storage_flags.locate(each) for each in self.storage]
        logs = [_log_source(each, self.storage_flags) for each in self.log]
        drills = [self.storage_flags.s3.locate(each) for each in self.drills]
        clusters = [self.cluster.config()] if self.cluster.pd else []
        from tikv_br.serve.access import parse_status_url

        pages, key = [parse_status_url(each) for each in self.status], self._status_key()
        from tikv_br.serve import sources
        from tikv_br.serve.watcher import Sources

        return Sources(
            backups=tuple(sources.BackupsSource(each, windows=bool(logs)) for each in storages),
            logs=tuple(sources.ArchiveSource(each) for each in logs),
            syncs=tuple(sources.StatusSource(each, key, self.cluster.ca) for each in pages),
            drills=tuple(sources.DrillSource(each) for each in drills),
            gc=tuple(sources.GcSource(each) for each in clusters),
        )

    def limits(self) -> OverviewLimits:
        """Return the limits beyond which something needs attention. Raises `UsageError`."""
        from tikv_br.serve.findings import AgeLimit, OverviewLimits

        ages = []
        for given in self.max_backup_age:
            prefix, _, text = given.rpartition("=")
            try:
                ages.append(AgeLimit(kinds.parse_duration(text), prefix))
            except typer.BadParameter as error:
                raise UsageError(
                    f"--max-backup-age {given}: {error.message}", hint="Pass 30h or weekly/=8d, for example."
                ) from None
        return OverviewLimits(self.max_lag, tuple(ages))

    def _status_key(self) -> SecretText:
        from tikv_br.storage.crypter import SecretText
        from tikv_br.web.address import read_key

        if self.status_key_file:
            return read_key(Path(self.status_key_file))
        own = shared.state_path("status.key")
        return read_key(own) if self.status and own.is_file() else SecretText()


def _log_source(url: str, storage: backup_flags.StorageFlags) -> LogSource:
    """A log archive by its URL. Raises `UsageError`."""
    from urllib.parse import unquote

    from tikv_br.archive.log import LogSource

    place, _, query = url.partition("?")
    parts = [each for each in query.split("&") if each]
    names = [unquote(each.removeprefix("id=")) for each in parts if each.startswith("id=")]
    rest = "&".join(each for each in parts if not each.startswith("id="))
    return LogSource(storage.locate(f"{place}?{rest}" if rest else place), names[-1] if names else "default")


@command(
    "serve", example="--storage s3://backups --log s3://backups/log --drills s3://backups/drills --pd 10.0.0.1:2379"
)
def serve(flags: ServeFlags) -> None:
    """Serve a read-only web page of backups, log archives, syncs, drills and garbage collection, until stopped.

    Also serves /healthz for probes, and /metrics for Prometheus.
    """
    from tikv_br.web.address import Address

    address = Address.parse(flags.listen, "--listen")
    if flags.refresh < SHORTEST_REFRESH:
        raise UsageError(f"--refresh is too short: pass at least {SHORTEST_REFRESH:g}s")
    token = shared.secret_of("--token", flags.token, flags.token_file)
    from tikv_br.serve.access import check_access
    from tikv_br.web.server import listening

    check_access(address, token)
    sources, limits = flags.sources(), flags.limits()
    from tikv_br.serve.watcher import Watcher
    from tikv_br.serve.web import Site

    stop = threading.Event()
    with signals.stopping(stop) as received, Watcher(sources, flags.refresh, limits) as watcher:
        site = Site(watcher.overview, watcher.report, address, token)
        with listening(address, site.answer, "--listen", site.methods) as chosen:
            url = f"http://{chosen}/"
            if flags.out.is_json:
                flags.out.result("listening", {"url": url})
            else:
                log.info("the overview is at %s", url)
            flags.out.flush()
            stop.wait()
    raise received[0]
