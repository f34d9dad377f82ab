"""Give a shard that is being added the topics and consumers of the other shards."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState
from eventsql_orchestration.errors import ConsumerNotFoundError, TopicNotFoundError
from eventsql_orchestration.model import NOT_PARTITIONED, Retention, Topic
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.topics.registry import Registry


def define(registry: Registry, new: Shard, *, active: bool) -> None:
    """Define on `new` all that is in `registry`, with its settings.

    Until the shard is `active`, it has no events. So this also deletes the definitions that were deleted on the other
    shards since the shard was prepared.
    """
    # Look at the new shard first: another process that registers or deletes something begins on the other shards.
    topics = {topic.name: topic for topic in new.registry.topics()}
    consumers = _consumers(new.registry)
    wanted = {topic.name: topic for topic in registry.topics()}
    wanted_consumers = _consumers(registry)
    if not active:
        for name, topic in topics.items():
            if name not in wanted or wanted[name].partitioned != topic.partitioned:
                with suppress(TopicNotFoundError):
                    new.registry.unregister_topic(name, force=True)
        for key, state in consumers.items():
            if key not in wanted_consumers or _is_partitioned(wanted_consumers[key]) != _is_partitioned(state):
                # The consumer may be gone already, with its topic.
                with suppress(TopicNotFoundError, ConsumerNotFoundError):
                    new.registry.unregister_consumer(*key)
        topics = {topic.name: topic for topic in new.registry.topics()}
        consumers = _consumers(new.registry)
    for topic in wanted.values():
        _define_topic(new, topic, topics.get(topic.name))
    for key, state in wanted_consumers.items():
        _define_consumer(new.registry, state, consumers.get(key))


def _consumers(registry: Registry) -> dict[tuple[str, str], ConsumerState]:
    """One partition of each consumer, by topic and name. Its settings are the same in all partitions."""
    return {(state.topic, state.name): state for state in registry.consumers()}


def _is_partitioned(state: ConsumerState) -> bool:
    return state.partition != NOT_PARTITIONED


def _define_topic(new: Shard, topic: Topic, existing: Topic | None) -> None:
    # The server of the new shard may be built without a compression that the other shards have.
    compression = topic.compression if topic.compression in new.registry.compressions() else None
    if existing is None:
        retention = topic.retention or Retention()
        new.registry.register_topic(replace(topic, retention=retention, compression=compression))
        return
    if topic.partitioned and existing.partitions != topic.partitions:
        new.repartitioner.repartition(topic.name, topic.partitions)
    if topic.retention != existing.retention:
        new.registry.set_retention(topic.name, topic.retention)
    if topic.storage is not None and topic.storage != existing.storage:
        new.registry.set_storage(topic.name, topic.storage)
    if compression is not None and compression != existing.compression:
        new.registry.set_compression(topic.name, compression)


def _define_consumer(registry: Registry, state: ConsumerState, existing: ConsumerState | None) -> None:
    if existing is None or (existing.max_attempts, existing.filter) != (state.max_attempts, state.filter):
        registry.register_consumer(
            Consumer(state.topic, state.name, partitioned=_is_partitioned(state)),
            max_attempts=state.max_attempts, filter=state.filter or EVERY_EVENT, held=True,
        )  # fmt: skip
    if state.paused != (existing is not None and existing.paused):
        change = registry.pause if state.paused else registry.resume
        change(state.topic, state.name)
