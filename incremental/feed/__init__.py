"""The change feed of a range: its changes as batches of rows, and its resolved-ts.

Modules, in reading order:
- events: what a feed yields
- frontier: which parts of the range have a subscription, and the resolved-ts of each
- inbox: the queue of received messages
- stream: one store's stream, its errors, and locating the regions of gaps
- decode: decodes messages
- ingests: which announced ingests resolved-ts waits for
- status, options: the status and the options of a feed
- subscriptions: keeps every part of the range subscribed, also after errors
- feed: yields rows and resolved-ts
"""
