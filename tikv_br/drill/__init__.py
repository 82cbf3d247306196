"""Rehearses a recovery end to end: backup, restore into a place of its own, verification, measurements, report.

Imports the other operations and composes them; they do not import it. In reading order:

- `run`: a drill from its options to its report and its page; the steps of each scenario
- `options`, `objectives`: what is requested, and what was measured
- `context`: what the steps find out for one another
- `ledger`: what a drill makes, saved before it is made, and its removal
- `targets`, `playground`: empty cluster, empty keyspace or playground
- `backups`: the backup to rehearse with
- `recovery`: restore and verification
- `damage`: the damage of the other scenarios, and whether it is detected
- `point`: restore to a random time, and its comparison with backup, log and source
- `tail`: following the source into the target
- `cutover`: the steps of ``--tail``, and the comparison with a source that is still written to
- `report`, `history`: the report, with heartbeat, webhook, textfile and command after a drill; earlier drills and retention
- `schedule`: a line for cron, units for systemd
"""
