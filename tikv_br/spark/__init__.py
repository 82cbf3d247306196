"""Running tasks: on Spark or on threads of the driver, with live progress.

Knows nothing of TiKV: a task is any picklable value, its work any picklable function.
"""
