"""Several databases as one platform: the same topics and consumers on each, keys spread over them."""

from eventsql_orchestration.sharded.platform import ShardedEventSQL

__all__ = ["ShardedEventSQL"]
