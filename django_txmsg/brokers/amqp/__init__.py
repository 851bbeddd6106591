"""Hops 4 to 6 on RabbitMQ over AMQP 0-9-1, with py-amqp.

py-amqp does the handshake and encodes AMQP's methods. This package implements
publishing, deliveries and confirms itself, because throughput depends on them. A single
write or read can contain many messages.
"""
