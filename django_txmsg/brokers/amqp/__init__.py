"""Hops 4 to 6 on RabbitMQ over AMQP 0-9-1, by py-amqp.

py-amqp shakes hands and speaks the methods. What a busy session does, publishing,
taking deliveries and confirms, is done here, in one write and one read for many.
"""
