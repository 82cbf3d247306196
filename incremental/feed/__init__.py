"""The change feed of a range: its changes as batches of rows, and its resolved-ts.

Modules, in reading order:
- frontier: which parts of the range have a subscription, and the resolved-ts of each
- stream: one store's stream: decoding, errors, and locating the regions of gaps
- feed: subscribes, resubscribes after errors, and yields rows and resolved-ts
"""
