"""Flags that commands share: one name, one help text, one environment variable each."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tikv_br.cli import kinds, log, settings
from tikv_br.cli.command import REQUIRED, AroundFlags, Flags, flag
from tikv_br.cli.log import LogForm, LogLevel
from tikv_br.cli.output import Output, OutputForm, failure_of
from tikv_br.environment import STATE, needed_user_folder
from tikv_br.errors import Failure, Stopped, UsageError
from tikv_br.redaction import redact
from tikv_br.storage.crypter import SecretText, read_secret
from tikv_br.tasks.settings import SparkSettings

if TYPE_CHECKING:
    from tikv_br.cluster.config import ClusterConfig, EtcdConfig, TlsFiles
    from tikv_br.report.hooks import Hooks

logger = logging.getLogger(__name__)


def secret_of(name: str, value: str, file: str) -> SecretText:
    """The secret of a flag or of its ``-file`` flag, stripped; empty = neither. Raises `UsageError`."""
    if value and file:
        raise UsageError(
            f"{name} and {name}-file cannot be combined",
            hint=f"Pass {name} or {name}-file, or set one of their variables.",
        )
    return read_secret(f"{name}-file", Path(file)) if file else SecretText(value.strip())


def words_of(name: str, command: str) -> tuple[str, ...]:
    """The words of a command in a flag. Raises `UsageError`."""
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"{name} is not a valid command: {error}") from None


def state_path(*parts: str) -> Path:
    """A path below tikv-br's directory in the user's state directory. Raises `UsageError` if there is none."""
    return needed_user_folder(STATE).joinpath(*parts)


# -------------------------------------------------------------------------------------------------- flags of all commands


def _configures_log(setting: str) -> Callable[[typer.Context, Any], Any]:
    """A callback that changes a setting of `log.configure`."""

    def use(context: typer.Context, value: Any) -> Any:  # noqa: ANN401 - whatever the setting is
        if not context.resilient_parsing:  # set while values are only checked or completed
            log.configure(**{setting: value})
        return value

    return use


def _use_quiet(context: typer.Context, *, quiet: bool) -> bool:
    if not context.resilient_parsing:
        log.configure(quiet=quiet)
        invocation = context.find_object(settings.Invocation)
        # Here, as this is the last option of logging.
        if invocation is not None and invocation.has_secrets:
            logger.warning(
                "a credential was passed on the command line, where `ps` and the shell history can show it: use a file or an "
                "environment variable instead"
            )
        for each in () if invocation is None else invocation.ignored:
            logger.warning("%s", each)
    return quiet


class CommandFlags(Flags, shared=True):
    """Base of the flags of every command."""

    output: OutputForm = flag(
        OutputForm.CONSOLE, "Output format: console (for people) or json (JSON lines, for scripts)."
    )
    config: str | None = flag(
        None,
        "Config file (TOML; default: ~/.config/tikv-br/config.toml if it exists).",
        metavar="FILE",
        is_eager=True,
        callback=settings.use_config,
    )
    log_level: LogLevel = flag(
        LogLevel.INFO, "Minimum level to log; debug adds tracebacks.", callback=_configures_log("level")
    )
    log_file: str | None = flag(
        None,
        "Append the log, with progress and errors, to this file (default: stderr).",
        metavar="FILE",
        callback=_configures_log("file"),
    )
    log_format: LogForm = flag(
        LogForm.TEXT, "Log format: text, or json (one object per line).", callback=_configures_log("form")
    )
    quiet: bool = flag(
        False,
        "Only print warnings, errors and what the command is asked for, such as rows or the plan of a dry run.",
        "--quiet",
        "-q",
        callback=_use_quiet,
    )

    @cached_property
    def out(self) -> Output:
        """Return the output that results are written to."""
        return Output(self.output)


class FailureHookFlags(AroundFlags):
    """What is run if a command that works until it is stopped fails."""

    on_failure: str = flag(
        "", "Command to run after a failure, with TIKV_BR_HOOK_* in its environment.", metavar="COMMAND"
    )

    def hooks(self) -> Hooks:
        """The hooks. Raises `UsageError`."""
        from tikv_br.report.hooks import Hooks

        return Hooks(on_failure=words_of("--on-failure", self.on_failure))

    def is_end(self, failure: Failure) -> bool:
        """Return whether a failure is how the command is meant to end."""
        return isinstance(failure, Stopped)

    def around(self, path: str, flags: Flags) -> AbstractContextManager[None]:
        """Run the hooks when the command has ended. Raises `UsageError` before it starts."""
        return nullcontext() if self == type(self)() else self._notifying(path, flags)

    @contextmanager
    def _notifying(self, path: str, flags: Flags) -> Iterator[None]:
        from tikv_br.report.hooks import CommandEnd

        hooks, started, began = self.hooks(), time.time(), time.monotonic()
        hooks.check()

        def end(failure: Failure | None) -> None:
            code, message, hint = (0, "", "") if failure is None else (failure.exit_code, failure.message, failure.hint)
            summary = flags.out.summary if isinstance(flags, CommandFlags) else {}
            seconds = time.monotonic() - began
            CommandEnd(path, code, started, seconds, redact(message), redact(hint or ""), summary).notify(hooks)

        try:
            yield
        except BaseException as error:
            if not self.is_end(failure := failure_of(error)):
                end(failure)
            raise
        end(None)


class HookFlags(FailureHookFlags):
    """Notifications of the end of a command that runs on a schedule; a signal is a failure."""

    heartbeat_url: str = flag("", "URL to request after a success.", metavar="URL")
    heartbeat_url_file: str = flag("", "File with the URL for --heartbeat-url.", metavar="FILE")
    textfile: str = flag("", "File to write for node_exporter's textfile collector (*.prom).", metavar="FILE")

    def hooks(self) -> Hooks:
        """The hooks. Raises `UsageError`."""
        heartbeat = secret_of("--heartbeat-url", self.heartbeat_url, self.heartbeat_url_file)
        return replace(super().hooks(), heartbeat=heartbeat, textfile=self.textfile)

    def is_end(self, failure: Failure) -> bool:
        """Return whether a failure is how the command is meant to end."""
        del failure
        return False


class ScheduleFlags(CommandFlags):
    """When a scheduled command runs, and who runs it."""

    form: Literal["crontab", "systemd"] = flag(REQUIRED, "Format to print. Nothing is installed.", "--print")
    at: str = flag("03:30", "Time of day, in the machine's time zone.", metavar="HH:MM")
    weekday: str = flag(
        "", "Day of the week, as sunday, or of the month, as 1 (default: every day).", "--on", metavar="DAY"
    )

    def text(self, command: str, words: Sequence[str]) -> str:
        """What runs a command of this program with these words. Raises `UsageError`."""
        from tikv_br.drill.schedule import crontab, systemd

        program = str(Path(sys.argv[0]).absolute())
        form = crontab if self.form == "crontab" else systemd
        return form([program, *command.split(), *words], self.at, self.weekday)


# ----------------------------------------------------------------------------------------------- clusters, keys and tasks


def pd(text: str, default: Sequence[str] = ("127.0.0.1:2379",)) -> Any:  # noqa: ANN401 - as `flag`
    """The declaration of ``--pd`` with its help."""
    return flag(list(default), text, "--pd", "-u", shared=True, metavar="ADDRESS")


def pd_time(config: ClusterConfig) -> float:
    """The time by a cluster's PD, in seconds since the epoch. Raises `ClusterError`."""
    from tikv_br.cluster.pd import PdClient
    from tikv_br.cluster.timestamps import physical_ms

    with PdClient(config) as pd:
        return physical_ms(pd.tso()) / 1000


class ClusterFlags(Flags, shared=True):
    pd: list[str] = pd("PD endpoints of the cluster, comma-separated: host:port,… (may be repeated).")
    ca: str | None = flag(None, "CA certificate (PEM). Enables TLS.", metavar="FILE")
    cert: str | None = flag(None, "Client certificate for mutual TLS (PEM).", metavar="FILE")
    key: str | None = flag(None, "Private key of --cert (PEM).", metavar="FILE")
    skip_version_check: bool = flag(False, "Use stores of versions that are refused because they are known to fail.")

    def config(self) -> ClusterConfig:
        """The cluster. Raises `UsageError`."""
        from tikv_br.cluster.config import ClusterConfig

        return ClusterConfig.from_flags(
            self.pd, ca=self.ca, cert=self.cert, key=self.key, skip_version_check=self.skip_version_check
        )

    def other(self, pd: str, ca: str | None, cert: str | None, key: str | None) -> ClusterConfig:
        """Another cluster; its TLS files as in `tls`. Raises `UsageError`."""
        from tikv_br.cluster.config import ClusterConfig, check_schemes, parse_addresses

        tls = self.tls(ca, cert, key)
        check_schemes(pd, tls, "the target", "a CA certificate")
        return ClusterConfig(pd=parse_addresses(pd), tls=tls, skip_version_check=self.skip_version_check)

    def tls(self, ca: str | None, cert: str | None, key: str | None) -> TlsFiles:
        """TLS files of another server: this cluster's files unless named; none if `ca` is empty."""
        from tikv_br.cluster.config import TlsFiles

        return TlsFiles() if ca == "" else TlsFiles(ca=ca or self.ca, cert=cert or self.cert, key=key or self.key)


class EtcdFlags(Flags, shared=True):
    """The etcd that has the state of a sync or of a group of captures."""

    etcd: str = flag(
        "",
        "etcd endpoints, comma-separated: host:port,… Prefix http:// to disable TLS (default: PD's etcd, at --pd).",
        metavar="ADDRESS",
    )
    etcd_ca: str | None = flag(None, "CA certificate for --etcd (PEM; default: --ca).", metavar="FILE")
    etcd_cert: str | None = flag(None, "Client certificate for --etcd (PEM; default: --cert).", metavar="FILE")
    etcd_key: str | None = flag(None, "Private key of --etcd-cert (PEM; default: --key).", metavar="FILE")
    etcd_user: str = flag("", "User name for --etcd.", metavar="NAME")
    etcd_password: str = flag(
        "", "Password. Needs --etcd-user. Prefer the environment variable: flags are visible in `ps`.", metavar="TEXT"
    )

    def etcd_config(self, source: ClusterFlags) -> EtcdConfig:
        """The etcd of a group on this cluster. Raises `UsageError`."""
        from tikv_br.cluster.config import EtcdConfig, check_schemes, parse_addresses

        if bool(self.etcd_user) != bool(self.etcd_password):
            raise UsageError("pass both or none of (--etcd-user, --etcd-password)")
        endpoints = parse_addresses(self.etcd) if self.etcd else source.config().pd
        plain = [part.strip().startswith("http://") for part in self.etcd.split(",") if part.strip()]
        tls = source.tls("" if all(plain) and plain else self.etcd_ca, self.etcd_cert, self.etcd_key)
        if any(plain) and not all(plain) and (tls.enabled or "https://" in self.etcd):
            raise UsageError(
                "--etcd has addresses with http://, without TLS, and others with TLS",
                hint="Write http:// before all of them for no TLS, or before none.",
            )
        check_schemes(self.etcd, tls, "--etcd", "--etcd-ca")
        return EtcdConfig(endpoints, tls, self.etcd_user, self.etcd_password)


KEYSPACE = partial(flag, "", "Keyspace, by id or name (API V2; default: 0).", shared=True, metavar="ID|NAME")
ALLOW_EMPTY = partial(
    flag, False, "Succeed if a requested range, keyspace or prefix has no row (default: exit code 66)."
)
ALLOW_FOLLOWERS = partial(
    flag,
    False,
    "Ingest although a follower of the cluster will miss these rows, such as TiKV-CDC or a sync of an older tikv-br (API V2; default: refuse).",
    command_line=True,
)
DRY_RUN = partial(flag, False, "Check and plan, but change nothing.")
REPORT = partial(
    flag,
    "",
    "Write a report, even if the command fails: FILE.html (with FILE.json next to it), or FILE.json alone.",
    metavar="FILE",
)
LOCK_WAIT = partial(
    flag, "0s", "Maximum time to wait for another run that has the lock (0 = fail at once).", kind=kinds.TIME
)
RATE_LIMIT = partial(
    flag,
    "0",
    "Maximum rate per store in bytes per second, as 10MiB or 512KiB; a plain number is MiB (0 = unlimited).",
    "--ratelimit",
    kind=kinds.RATE,
    shared=True,
)
SEND_CREDENTIALS = partial(
    flag,
    True,
    "Send this process's storage credentials to the stores; otherwise they use their own.",
    "--send-credentials-to-tikv/--no-send-credentials-to-tikv",
)
VIA = partial(
    flag,
    "auto",
    "How files get to the stores: stores (each store downloads them), upload (tikv-br reads and uploads them), or auto (upload only "
    "what stores cannot read).",
)
SEED = partial(flag, 0, limits=(0, kinds.MAX_SEED))


class SparkMasterFlags(Flags, shared=True):
    spark_master: str = flag("local[*]", "URL of the Spark master: local[*], spark://…, yarn or k8s://…", metavar="URL")
    spark_conf: list[str] = flag(
        [], "Setting of Spark, such as spark.executor.memory=4g (may be repeated).", metavar="KEY=VALUE"
    )
    spark_archive: str = flag(
        "",
        "Archive with the Python environment of a cluster's workers, made by `tikv-br spark pack`: a file, or a URL that they can read.",
        metavar="FILE",
    )

    def combined(self) -> dict[str, Any]:
        """The settings for starting Spark."""
        return {"spark_settings": SparkSettings.parse(self.spark_conf, self.spark_archive)}


class SparkFlags(SparkMasterFlags, shared=True):
    executor: Literal["auto", "driver", "spark"] = flag(
        "auto",
        "Where tasks run: driver (threads of this process), spark, or auto (spark for large amounts of work, e.g. scans from 4 GiB).",
    )


class TaskFlags(SparkFlags):
    concurrency: int | None = flag(
        None,
        "Maximum number of concurrent tasks (default: depends on the executor, the CPU count and the kind of work).",
        shared=True,
        limits=(1, kinds.MAX_CONCURRENCY),
    )
