"""The change feed of a range: its changes as batches of rows, and its resolved-ts.

Modules, in reading order:
- events: what a feed yields, its options and its status
- stream: which parts of the range have a subscription, and the resolved-ts of each; one store's stream, the queue of its messages, its errors, and locating the regions of gaps
- ingests: which announced ingests resolved-ts waits for
- feed: keeps every part of the range subscribed, also after errors; decodes messages, yields rows and resolved-ts
"""
