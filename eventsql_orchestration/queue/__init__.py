"""SQS-style queues: a message goes to one receiver at a time until it is acknowledged."""

from eventsql_orchestration.queue.queue import Message, Queue, QueueDepth

__all__ = ["Message", "Queue", "QueueDepth"]
