"""Hops 4 to 6 on RabbitMQ over AMQP 0-9-1, by py-amqp.

py-amqp does the handshake and encodes methods. Publishing, deliveries and confirms, on
which throughput depends, are implemented here, with one write and one read for many
messages.
"""
