"""Option types of ``backup raw`` alone."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tikv_br.cli.options import parse_duration, parse_size

EngineOption = Annotated[
    Literal["auto", "store", "scan"],
    typer.Option(
        "--engine",
        envvar="TIKV_BR_ENGINE",
        help="Who writes the files: the stores, or tasks that scan; auto: stores where TTL or timestamps must be kept.",
    ),
]
SendCredentialsOption = Annotated[
    bool,
    typer.Option(
        "--send-credentials-to-tikv/--no-send-credentials-to-tikv",
        help="Give stores that write files this process's storage credentials; without, they use their own.",
    ),
]
DstApiVersionOption = Annotated[
    Literal["v1", "v1ttl", "v2"] | None,
    typer.Option(
        "--dst-api-version",
        envvar="TIKV_BR_DST_API_VERSION",
        help="API version to write the backup in; default: the cluster's own.",
    ),
]
FormatOption = Annotated[
    Literal["raw", "hex", "escaped", "sst", "parquet"],
    typer.Option("--format", help="How keys of flags are written; sst or parquet: the same as --file-format."),
]
FileFormatOption = Annotated[
    Literal["sst", "parquet"] | None,
    typer.Option(
        "--file-format",
        help="What the files are: SSTs, which the Go TiKV-BR restores too, or Parquet, which any tool reads.",
        show_default="sst",
    ),
]
KeyspacesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keyspace",
        envvar="TIKV_BR_KEYSPACE",
        metavar="ID|NAME|all",
        help="Keyspace of an API V2 cluster, or all that hold data; may be given several times.",
    ),
]
RangesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="START:END",
        help="Keys from START on, without END; either may be empty. May be given several times.",
    ),
]
AllowLossOption = Annotated[
    str,
    typer.Option(
        "--allow-loss",
        metavar="ttl,ts,keyspace",
        help="What --dst-api-version may cost: expiry, timestamps, keyspace. Without it nothing is lost.",
    ),
]
CompressionOption = Annotated[
    Literal["zstd", "lz4", "snappy", "none"],
    typer.Option("--compression", envvar="TIKV_BR_COMPRESSION", help="How files are compressed."),
]
CompressionLevelOption = Annotated[
    int, typer.Option("--compression-level", help="Level of zstd or lz4; 0: the default of each.")
]
FileSizeOption = Annotated[
    int,
    typer.Option(
        "--file-size",
        parser=parse_size,
        show_default="96MiB",
        metavar="SIZE",
        help="Keys and values in one file, before compression; SSTs that stores write hold a region each.",
    ),
]
SafeIntervalOption = Annotated[
    float,
    typer.Option(
        "--safe-interval",
        parser=parse_duration,
        metavar="TIME",
        show_default="1m",
        help="How far backup-ts lies behind the cluster's clock.",
    ),
]
GcTtlOption = Annotated[
    float,
    typer.Option(
        "--gcttl",
        parser=parse_duration,
        metavar="TIME",
        show_default="5m",
        help="How long GC is held back from backup-ts after the backup.",
    ),
]
ChecksumOption = Annotated[
    bool, typer.Option("--checksum/--no-checksum", help="Compare with the cluster's own checksums afterwards.")
]
AssumeNoTtlOption = Annotated[
    bool, typer.Option("--assume-no-ttl", help="Take it that no key expires, instead of finding out for each.")
]
LockWaitOption = Annotated[
    float,
    typer.Option(
        "--lock-wait",
        parser=parse_duration,
        metavar="TIME",
        help="How long to wait for a path that another run holds.",
    ),
]
NoResumeOption = Annotated[
    bool,
    typer.Option("--no-resume", help="Remove what an unfinished run left at the path, instead of going on with it."),
]
