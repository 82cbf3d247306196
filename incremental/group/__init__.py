"""Captures: processes that share changefeeds through etcd.

Modules, in reading order:
- model: what the group stores in etcd
- store: reading and writing it
- changefeeds: the user's commands: create, pause, resume, update, remove
- scheduler: which capture runs which task (pure functions)
- owner: splits changefeeds, assigns tasks, publishes checkpoints
- capture: joins the group and runs the tasks assigned to it
- task_checkpoints: the checkpoint of a task
- worker: runs one task
"""
