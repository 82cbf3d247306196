"""Option types of ``backup raw`` alone."""

from __future__ import annotations

from typing import Annotated

import typer

ENGINES = ("auto", "store", "scan")
EXECUTORS = ("auto", "driver", "spark")

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="TIKV_BR_ENGINE",
        metavar="|".join(ENGINES),
        help="Who writes the files: the stores, or tasks that scan; auto: stores where TTL or timestamps must be kept.",
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="|".join(EXECUTORS),
        help="Where tasks run; auto: on this machine where stores write, else on Spark.",
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
    str,
    typer.Option(
        "--dst-api-version",
        envvar="TIKV_BR_DST_API_VERSION",
        metavar="v1|v1ttl|v2",
        help="API version to write the backup in; default: the cluster's own.",
    ),
]
CompressionOption = Annotated[
    str, typer.Option("--compression", envvar="TIKV_BR_COMPRESSION", help="zstd, lz4, snappy or none.")
]
CompressionLevelOption = Annotated[
    int, typer.Option("--compression-level", help="Level of zstd or lz4; 0: the default of each.")
]
FileSizeOption = Annotated[
    str,
    typer.Option(
        "--file-size",
        metavar="SIZE",
        help="Keys and values in one file of --engine scan, before compression; stores write a file a region.",
    ),
]
SafeIntervalOption = Annotated[
    str, typer.Option("--safe-interval", metavar="TIME", help="How far backup-ts lies behind the cluster's clock.")
]
GcTtlOption = Annotated[
    str, typer.Option("--gcttl", metavar="TIME", help="How long GC is held back from backup-ts after the backup.")
]
ChecksumOption = Annotated[
    bool, typer.Option("--checksum/--no-checksum", help="Compare with the cluster's own checksums afterwards.")
]
AssumeNoTtlOption = Annotated[
    bool, typer.Option("--assume-no-ttl", help="Take it that no key expires, instead of finding out for each.")
]
