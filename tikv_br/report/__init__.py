"""Reports of commands and drills, as JSON and as HTML pages.

Imports storage and backup sets, never the operations themselves.

Modules, in reading order:

- `recorder`: records steps and throughput while an operation runs
- `facts`: the values that reports consist of
- `operation`: the report of a single command
- `draft`: collects that report while the command runs; loads nothing heavy
- `hooks`: heartbeat, text file and command after a scheduled command
- `plot`: geometry of the plots
- `page`: renders pages from the templates in `pages`
"""
