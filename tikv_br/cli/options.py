"""Option types that commands share: one name, one help text, one environment variable each."""

from __future__ import annotations

import enum
import math
import re
from typing import Annotated, Literal

import typer


class OutputForm(enum.StrEnum):
    """How results are written."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The least severity that is logged, as in the standard library."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class KeyForm(enum.StrEnum):
    """How keys are written as text."""

    RAW = "raw"
    HEX = "hex"
    ESCAPED = "escaped"


_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_duration(text: str | float) -> float:
    """Read ``90s``, ``1m``, ``1h30m``, ``500ms`` or plain seconds; returns seconds. Raises `typer.BadParameter`."""
    bare = str(text).strip()
    if re.fullmatch(r"\d+(\.\d+)?", bare):
        return float(bare)
    parts = _DURATION_PART.findall(bare)
    if not parts or "".join(number + unit for number, unit in parts) != bare:
        raise typer.BadParameter(f"{bare!r} is no duration: write 90s, 5m, 1h30m or 500ms")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def bytes_per_second(rate_limit: float) -> int:
    """The bytes of ``--ratelimit``, never 0 for what is a limit."""
    return math.ceil(rate_limit * 2**20)


def parse_size(text: str | int) -> int:
    """Read ``64MiB``, ``64m``, ``1GB`` or plain bytes (units are powers of 1024). Raises `typer.BadParameter`."""
    bare = str(text).strip()
    match = _SIZE.fullmatch(bare)
    if match is None:
        raise typer.BadParameter(f"{bare!r} is no size: write 4096, 64KiB, 16MiB or 1GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


PdOption = Annotated[
    list[str],
    typer.Option(
        "--pd",
        "-u",
        envvar="TIKV_BR_PD",
        metavar="ADDRESS",
        help="PD's address, or several of one cluster: host:port,… or once each.",
    ),
]
OptionalPdOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pd", "-u", envvar="TIKV_BR_PD", metavar="ADDRESS", help="PD's address, to release the safe point too."
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option("--ca", envvar="TIKV_BR_CA", metavar="FILE", help="Certificate of the authority (PEM); turns TLS on."),
]
CertOption = Annotated[
    str | None,
    typer.Option("--cert", envvar="TIKV_BR_CERT", metavar="FILE", help="Own certificate for mutual TLS (PEM)."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="TIKV_BR_KEY", metavar="FILE", help="Key of --cert (PEM)."),
]
OutputOption = Annotated[
    OutputForm,
    typer.Option("--output", envvar="TIKV_BR_OUTPUT", help="Results for people, or JSON lines for scripts."),
]
FormatOption = Annotated[
    KeyForm,
    typer.Option("--format", help="How keys are written: as they are, hex, or \\xNN escapes."),
]
StartOption = Annotated[str, typer.Option("--start", metavar="KEY", help="First key of the range (inclusive).")]
EndOption = Annotated[str, typer.Option("--end", metavar="KEY", help="End of the range (exclusive); empty: no bound.")]
KeyspaceOption = Annotated[
    str,
    typer.Option("--keyspace", envvar="TIKV_BR_KEYSPACE", metavar="ID|NAME", help="Keyspace of an API V2 cluster."),
]
StorageOption = Annotated[
    str,
    typer.Option(
        "--storage",
        "-s",
        envvar="TIKV_BR_STORAGE",
        metavar="URL",
        help="Where the backup lies: local:///dir or s3://bucket/prefix?endpoint=…&region=…&force-path-style=true",
    ),
]
S3EndpointOption = Annotated[
    str | None,
    typer.Option("--s3.endpoint", envvar="TIKV_BR_S3_ENDPOINT", metavar="URL", help="S3 endpoint if not Amazon's."),
]
S3RegionOption = Annotated[
    str | None, typer.Option("--s3.region", envvar="TIKV_BR_S3_REGION", metavar="NAME", help="S3 region.")
]
S3StorageClassOption = Annotated[
    str | None,
    typer.Option("--s3.storage-class", envvar="TIKV_BR_S3_STORAGE_CLASS", metavar="NAME", help="S3 storage class."),
]
S3SseOption = Annotated[
    str | None,
    typer.Option(
        "--s3.sse", envvar="TIKV_BR_S3_SSE", metavar="NAME", help="Encryption by the server: AES256 or aws:kms."
    ),
]
S3SseKmsKeyOption = Annotated[
    str | None,
    typer.Option("--s3.sse-kms-key-id", envvar="TIKV_BR_S3_SSE_KMS_KEY_ID", metavar="ID", help="Key for aws:kms."),
]
S3AclOption = Annotated[
    str | None,
    typer.Option("--s3.acl", envvar="TIKV_BR_S3_ACL", metavar="NAME", help="Known, and refused: see its message."),
]
S3ProviderOption = Annotated[
    str | None,
    typer.Option(
        "--s3.provider", envvar="TIKV_BR_S3_PROVIDER", metavar="NAME", help="Kind of S3 service, as in TiKV-BR."
    ),
]
S3CaOption = Annotated[
    str | None,
    typer.Option(
        "--s3.ca",
        envvar="TIKV_BR_S3_CA",
        metavar="FILE",
        help="Authorities (PEM) to trust for S3 besides the system's; default: AWS_CA_BUNDLE.",
    ),
]
S3PathStyleOption = Annotated[
    bool | None,
    typer.Option(
        "--s3.force-path-style/--s3.no-force-path-style",
        envvar="TIKV_BR_S3_FORCE_PATH_STYLE",
        help="Bucket in the path instead of the host name.",
    ),
]
CrypterMethodOption = Annotated[
    str,
    typer.Option(
        "--crypter.method",
        envvar="TIKV_BR_CRYPTER_METHOD",
        metavar="NAME",
        autocompletion=lambda: ["plaintext", "aes128-ctr", "aes192-ctr", "aes256-ctr"],
        help="Encryption of the backup: plaintext, aes128-ctr, aes192-ctr or aes256-ctr; default: as long as the key.",
    ),
]
CrypterKeyOption = Annotated[
    str,
    typer.Option(
        "--crypter.key",
        envvar="TIKV_BR_CRYPTER_KEY",
        metavar="HEX",
        help="Key in hexadecimal; the variable or --crypter.key-file keep it from the shell's history.",
    ),
]
CrypterKeyFileOption = Annotated[
    str,
    typer.Option(
        "--crypter.key-file",
        envvar="TIKV_BR_CRYPTER_KEY_FILE",
        metavar="FILE",
        help="File that holds the key in hexadecimal.",
    ),
]
ExecutorName = Literal["auto", "driver", "spark"]
ExecutorOption = Annotated[
    ExecutorName,
    typer.Option(
        "--executor",
        envvar="TIKV_BR_EXECUTOR",
        help="Where tasks run: threads of this process, or Spark; auto: here where stores do the work, else on Spark.",
    ),
]
RateLimitOption = Annotated[
    float,
    typer.Option(
        "--ratelimit",
        envvar="TIKV_BR_RATELIMIT",
        min=0.0,
        metavar="MIB",
        help="MiB a second that each store may spend on this; 0: no limit.",
    ),
]
SparkMasterOption = Annotated[
    str,
    typer.Option(
        "--spark-master", envvar="TIKV_BR_SPARK_MASTER", metavar="URL", help="Spark master: local[*], spark://…"
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", envvar="TIKV_BR_CONCURRENCY", min=1, help="Tasks that run at the same time."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check and plan, change nothing.")]
DEFAULT_PD = ["127.0.0.1:2379"]
