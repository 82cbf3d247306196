#!/usr/bin/env python3
"""Compare what the demo measured, show it as a table, and fail when anything differs."""

from __future__ import annotations

import json
import sys

from tikv_br.cli.output import Output, OutputForm, human_bytes, human_seconds

PREFIX = 4  # bytes that API V2 puts in front of every key


def main() -> int:
    """Take the JSON results of both checksums, backup and restore, and the hashes of both scans."""
    v1, v2, backup, restore = (json.loads(text) for text in sys.argv[1:5])
    v1_hash, v2_hash = sys.argv[5:7]
    rows = [
        ("pairs", f"{v1['total_kvs']:,}", f"{backup['total_kvs']:,}", f"{v2['total_kvs']:,}"),
        ("user bytes", *(f"{n:,}" for n in (v1["total_bytes"], user_bytes(backup), user_bytes(v2)))),
        ("checksum", f"{v1['crc64xor']:016x}", f"{backup['crc64xor']:016x}", f"{v2['crc64xor']:016x}"),
        ("sha256 of a full scan", v1_hash, "", v2_hash),
        ("time", "", human_seconds(backup["seconds"]), human_seconds(restore["seconds"])),
        ("size stored", "", human_bytes(backup["backup_size"]), ""),
    ]
    Output(OutputForm.CONSOLE).table(("", "V1 cluster", "backup (V2 form)", "V2 cluster"), rows, title="\nSummary")
    checks = {
        "pairs of V1, backup, restore and V2": len(
            {v1["total_kvs"], backup["total_kvs"], restore["total_kvs"], v2["total_kvs"]}
        )
        == 1,
        "user bytes of V1, backup and V2": v1["total_bytes"] == user_bytes(backup) == user_bytes(v2),
        "checksum of the backup and of V2's servers": backup["crc64xor"] == v2["crc64xor"],
        "every pair of V1 and V2": v1_hash == v2_hash,
    }
    print()
    for what, equal in checks.items():
        print(f"{'equal ' if equal else 'DIFFER'}  {what}")
    return 0 if all(checks.values()) else 1


def user_bytes(figures: dict[str, int]) -> int:
    """Return keys and values without the prefixes that V2 counts."""
    return figures["total_bytes"] - PREFIX * figures["total_kvs"]


if __name__ == "__main__":
    sys.exit(main())
