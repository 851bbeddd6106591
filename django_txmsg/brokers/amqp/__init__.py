"""Hops 4 to 6 on RabbitMQ over AMQP 0-9-1, with py-amqp.

py-amqp does the handshake and encodes methods. This package implements publishing,
deliveries and confirms, because throughput depends on them. One write, and one read,
can contain many messages.
"""
