"""Option types of ``restore raw`` alone."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tikv_br.cli.options import parse_duration, parse_size

SourceKeyspaceOption = Annotated[
    int | None,
    typer.Option("--keyspace", min=0, metavar="ID", help="Restore only this keyspace of the backup (API V2)."),
]
ToKeyspaceOption = Annotated[
    str, typer.Option("--to-keyspace", metavar="ID|NAME", help="Keyspace that the rows are to be in (API V2).")
]
RewritePrefixOption = Annotated[
    str,
    typer.Option(
        "--rewrite-prefix",
        metavar="OLD=NEW",
        help="Restore only keys that begin with OLD, with NEW in its place; written as --format says.",
    ),
]
ModeOption = Annotated[
    Literal["ingest", "put"],
    typer.Option("--mode", help="Stores take in whole files, or rows are put one by one."),
]
ViaOption = Annotated[
    Literal["auto", "stores", "upload"],
    typer.Option("--via", help="Stores fetch files themselves, or are sent them from here where they cannot."),
]
RestampOption = Annotated[
    bool,
    typer.Option("--restamp", help="Give rows newer than the target's TSO a timestamp of the target (API V2)."),
]
FilesOption = Annotated[
    int, typer.Option("--concurrency", envvar="TIKV_BR_CONCURRENCY", min=1, help="Files under way at once.")
]
ImportModeOption = Annotated[
    bool,
    typer.Option(
        "--import-mode/--online",
        help="Put stores into import mode and pause PD's balancing meanwhile, or leave the cluster to its users.",
    ),
]
ChecksumOption = Annotated[
    bool, typer.Option("--checksum/--no-checksum", help="Compare the cluster's checksums with the backup's.")
]
FileCheckOption = Annotated[
    Literal["auto", "identity", "content"],
    typer.Option("--file-check", help="How much of each file is read before."),
]
RegionSizeOption = Annotated[
    int,
    typer.Option(
        "--region-size",
        parser=parse_size,
        show_default="96MiB",
        metavar="SIZE",
        help="Keys and values that a region of the target is to hold at most, where it is split before an ingest.",
    ),
]
AllowOverwriteOption = Annotated[bool, typer.Option("--allow-overwrite", help="Restore into a range that holds data.")]
SendCredentialsOption = Annotated[
    bool,
    typer.Option(
        "--send-credentials-to-tikv/--no-send-credentials-to-tikv",
        help="Give the stores this process's storage credentials; without, they use their own.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Go on with an unfinished restore of this backup, or begin anew."),
]
RestoreWaitOption = Annotated[
    float,
    typer.Option(
        "--lock-wait",
        parser=parse_duration,
        metavar="TIME",
        help="How long to wait for another restore of this backup into this cluster.",
    ),
]
StateOption = Annotated[
    str,
    typer.Option(
        "--state",
        envvar="TIKV_BR_STATE",
        metavar="URL",
        help="Where it is written down what is done, to be resumed; by default beside the backup.",
    ),
]
