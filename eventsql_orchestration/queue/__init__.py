"""SQS-style queues: a message goes to one receiver at a time until it is acknowledged."""

from eventsql_orchestration.queue.message import Message, QueueDepth
from eventsql_orchestration.queue.queue import Queue

__all__ = ["Message", "Queue", "QueueDepth"]
