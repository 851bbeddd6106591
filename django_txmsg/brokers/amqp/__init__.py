"""Hops 4 to 6 on RabbitMQ over AMQP 0-9-1, with py-amqp.

py-amqp does the handshake and encodes AMQP's methods. For more throughput, this package
itself implements publishing, deliveries and confirms, so that a single write or read
can contain many messages.
"""
