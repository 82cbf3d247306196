"""Changes in Kafka topics: how they are written as messages, and how brokers are reached.

Modules, in reading order:
- messages: the protocols, as encoders and decoders
- url: ``kafka://`` addresses and their parameters
- client: librdkafka's configuration, and its errors as ours
- topic: looks up, checks and creates the topic
- group: reads a topic as the single member of a consumer group
- replay: applies a topic to a cluster
"""
