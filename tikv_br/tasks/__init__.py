"""Runs tasks on threads of the driver or on Spark, with live progress.

Knows nothing of TiKV: a task is any picklable value, its work any picklable function.

Modules, in reading order:

- `executor`: `run_tasks`, for Spark and for threads
- `task`: the context of a task, its messages to the driver, and what becomes of them
- `channel`: the connection that carries them from Spark, loaded only there
- `settings`: the user's settings for Spark, and a session's settings
- `session`: starts and stops Spark, runs jobs on workers that have this tikv-br
- `shipped`: what runs there before that is known
- `pack`: an archive with this Python's tikv-br for the workers of a cluster
- `inputs`, `frames`: inputs of Spark SQL, and functions over their partitions
"""
