"""The command line: parses flags, calls one function of another package, and prints its result.

To add a command, write in a module here::

    class StatusFlags(
        IndexFlags
    ):  # or another class of `shared`; each field is a flag, its variable and its config key
        age: float = flag("1h", "Maximum age of the newest backup.", kind=TIME)


    @command("log status", example="--age 2h")
    def status(flags: StatusFlags) -> None: ...

and add the module to `main.Commands.table` if the first word is new. ``flags.fill(Options)`` copies flags to options of the same name.
Modules here import nothing heavy at their top, so that ``--help`` is fast.

Modules, in reading order:

- main: the entry point, the table of commands, errors and exit codes
- command: how a command is declared, found, and imported only when it runs
- help: groups of options, and which of them only ``--help-all`` shows
- shared: flags that commands share; backup_flags: storage and backups; key_flags: keys, ranges, log archives and times; kinds: durations, sizes, rates
- settings: the config file
- output: results as text or JSON lines; keys, sizes, durations and tables as text
- log: the log on stderr or in a file
- progress: progress displays
- backup_cmd, restore_cmd, verify_cmd, diff_cmd, check_cmd: the commands of those names; summaries: what backups and restores show
- backups_cmd: ``list``, ``prune`` and ``backup pin``, ``unpin``, ``abort``, ``unlock``, ``delete``; show_cmd: ``show`` and ``cat``
- sync_flags: flags of syncs, captures and changefeeds; status_flags: flags of the status that they serve
- sync_view: status of running syncs
- sync_cmd, log_cmd, changefeed_cmd, capture_cmd (``changefeed capture``)
- drill_cmd, export_cmd, gc_cmd, kafka_cmd, load_cmd, playground_cmd, raw_cmd, serve_cmd, spark_cmd, config_cmd (with ``version`` and ``help``)
"""

import gc

gc.set_threshold(100_000, 20, 20)
# Before anything is imported: by Python's defaults, a fifth of the time in which modules are imported goes into looking for garbage.
