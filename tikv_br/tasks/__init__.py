"""Runs tasks on threads of the driver or on Spark, with live progress.

Knows nothing of TiKV: a task is any picklable value, its work any picklable function.

Modules, in reading order:

- `executor`: `run_tasks`, for Spark and for threads
- `collector`: what becomes of the messages of tasks
- `task`: the context of a task, and its messages to the driver
- `channel`: the connection over which tasks report progress
- `settings`: the user's settings for Spark, and those of a session
- `session`: starts and stops Spark
- `jobs`, `shipped`: jobs, on workers that have this tikv-br; what runs there before that is known
- `pack`: an archive with this Python's tikv-br for the workers of a cluster
- `inputs`, `frames`: inputs of Spark SQL, and functions over their partitions
"""
