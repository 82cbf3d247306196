"""Captures: processes that share changefeeds through etcd.

Modules, in reading order:
- model: what the group stores in etcd
- store: reading and writing it
- changefeeds: the user's commands: create, pause, resume, update, remove
- owner: which capture runs which task; splits changefeeds, assigns tasks, publishes checkpoints
- capture: joins the group and runs the tasks assigned to it
- worker: runs one task, with its checkpoint
"""
