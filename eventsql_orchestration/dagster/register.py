"""The messages about topics, consumers and queues that the job `register` has yet to create."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.errors import ConsumerNotFoundError, TopicNotFoundError
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.queue import list_queues
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import advised

REGISTER_JOB: Final = "register"

LAUNCH_IT: Final = (
    f"launch the job `{REGISTER_JOB}`, in Dagster's UI or with `dagster job launch -j {REGISTER_JOB}` (definitions "
    f"with a name have `{REGISTER_JOB}_<name>`)"
)


def topic_missing(topic: str) -> str:
    """The message for a topic that a code location declares and that does not exist."""
    return f"topic {topic!r} is not registered: {LAUNCH_IT}"


def require_topic(platform: EventSQL, topic: str) -> None:
    """Raises `TopicNotFoundError`, which tells the user what to do."""
    try:
        platform.registry.topic(topic)
    except TopicNotFoundError as error:
        raise TopicNotFoundError(
            f"{topic_missing(topic)}; the job creates the topics of consumers, of `publishes=` and of `topics=`"
        ) from error


def queue_missing(queue: str) -> str:
    """The message for a queue that a code location declares and that does not exist."""
    return f"queue {queue!r} is not registered: {LAUNCH_IT}"


def require_queue(platform: EventSQL, queue: str) -> None:
    """Raise `dagster.Failure` if no shard has the queue."""
    known = (each.name for shard in shards_of(platform) if shard.down is None for each in list_queues(shard.database))
    if queue not in known:
        raise dg.Failure(queue_missing(queue), allow_retries=False)


def consumer_missing(consumer: Consumer) -> str:
    """The message for a consumer that an asset declares and that does not exist."""
    return f"consumer {consumer.name!r} of topic {consumer.topic!r} is not registered: {LAUNCH_IT}"


def undeclared(platform: EventSQL, topics: Iterable[Topic], consumers: Iterable[Consumer]) -> list[tuple[str, str]]:
    """The consumers of `topics` that are not among `consumers`: another location declares them, or this location
    declared them before.

    Each is a topic and a name. The side consumers of backfills are left out.
    """
    declared = {(each.topic, each.name) for each in consumers}
    found = {(state.topic, state.name) for topic in topics for state in platform.registry.consumers(topic.name)}
    return sorted(each for each in found - declared if backfill_of(each[1]) is None)


def undeclared_consumer(topic: str, consumer: str) -> str:
    """The message for a consumer that is registered and that the location does not declare."""
    return (
        f"consumer {consumer!r} of topic {topic!r} is registered, and not declared here. If it was removed, delete it "
        f"and its offsets: {advised('consumer delete --execute', topic, consumer)}"
    )


def why_unregistered(platform: EventSQL | Shard, topic: Topic, consumer: Consumer) -> str | None:
    """Why an asset's consumer cannot consume: it is missing, or it has another form than the asset declares.

    None if it is registered as declared. Raises `DatabaseUnavailableError`.
    """
    try:
        registered = platform.registry.topic(topic.name)
    except TopicNotFoundError:
        return topic_missing(topic.name)
    states = [state for state in platform.registry.consumers(topic.name) if state.name == consumer.name]
    if not states:
        return _other_topic(registered, topic, consumer) or consumer_missing(consumer)
    if any((state.partition != NOT_PARTITIONED) != consumer.partitioned for state in states):
        return _other_form(consumer)
    return None


@contextmanager
def failing_if_unregistered(platform: EventSQL, topic: Topic, consumer: Consumer) -> Iterator[None]:
    """Raise `dagster.Failure` with the reason if the block misses an asset's consumer or its topic."""
    try:
        yield
    except (ConsumerNotFoundError, TopicNotFoundError) as error:
        why = why_unregistered(platform, topic, consumer) or error.message
        raise dg.Failure(why, allow_retries=False) from error


def _other_form(consumer: Consumer) -> str:
    """The message for a consumer that is registered in another form than its asset declares."""
    is_now, declared = ("not ", "") if consumer.partitioned else ("", "not ")
    return (
        f"consumer {consumer.name!r} of topic {consumer.topic!r} is registered as {is_now}partitioned, but its asset "
        f"declares it as {declared}partitioned: give the asset partitioned={not consumer.partitioned}, or delete the "
        f"consumer and its offsets with `{advised('consumer delete --execute', consumer.topic, consumer.name)}` and "
        f"{LAUNCH_IT}"
    )


def _other_topic(registered: Topic, topic: Topic, consumer: Consumer) -> str | None:
    """Why the job `register` would fail: the consumer is partitioned, and its topic is not."""
    if registered.partitioned or not consumer.partitioned:
        return None
    return (
        f"topic {topic.name!r} is registered without partitions, and the asset of consumer {consumer.name!r} declares "
        f"{topic.partitions}: if the topic has neither events nor consumers, {LAUNCH_IT}; otherwise give the asset "
        "partitioned=False and its topic no partitions, or give it another topic"
    )
