"""Changes in Kafka topics: how they are written as messages, and how brokers are reached.

Modules, in reading order:
- messages: changes and messages, and what the protocols share
- open_protocol, json_protocol: the protocols, as encoders and decoders
- url: ``kafka://`` addresses and their parameters
- client: librdkafka's configuration, its errors as ours, and failures of brokers while a topic is read
- topic: looks up, checks and creates the topic
- group: reads a topic as the single member of a consumer group
- topic_feed: turns messages into rows and resolved-ts
- replay: applies a topic to a cluster
"""
