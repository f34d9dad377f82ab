"""The topics and consumers of a platform: the same on each of its shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Unpack

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.consumer import Consumer, ConsumerState
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseUnavailableError,
    EventSQLError,
    ShardsDifferError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import NOT_PARTITIONED, UNCOMPRESSED, Compression, Retention, Storage, Topic
from eventsql_orchestration.shards.barriers import Barriers
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.storage import compressing
from eventsql_orchestration.topics.catalog import check_form, no_consumer
from eventsql_orchestration.topics.positions import AtOffset, starting_at
from eventsql_orchestration.topics.registration import Registration, merged
from eventsql_orchestration.topics.registry import RETRY_SECONDS, ConsumerSettings, Registry
from eventsql_orchestration.validation import Duration, advised

logger = logging.getLogger(__name__)


@checked
class ClusterRegistry:
    """Creates, lists and deletes topics and consumers.

    With several shards, a change needs all of them, and is made on one after the other. If it stops in between, call it
    again to complete it. Reading leaves out the shards that are down.
    """

    def __init__(self, cluster: Cluster, barriers: Barriers) -> None:
        self._cluster = cluster
        self._lone = None if cluster.lone is None else cluster.lone.registry
        self._barriers = barriers
        self._compared: set[str] = set()

    # Topics

    def register_topic(self, topic: Topic) -> ClusterRegistry:
        """As `declare_topic`; gives the registry, for the next registration."""
        self.declare_topic(topic)
        return self

    def declare_topic(self, topic: Topic) -> Registration:
        """Create `topic` if it does not exist; returns the changes.

        Its number of partitions can change while it has neither events nor consumers; `RedefinitionError` otherwise. If
        it was repartitioned, and had the declared number before, it keeps its present number, and a warning is logged.
        Its retention can always change; without a declared retention, a topic keeps its present retention. Raises
        `InvalidNameError` for a name that a table of the platform has taken, `DatabaseBusyError` if publishers are in
        the way, and `RegistryError` if a server is built without the topic's compression.
        """
        self._check_compression(topic.compression)
        done = self._cluster.fan_out(lambda shard: shard.registry.declare_topic(topic))
        registration = merged(list(done.values()))
        if registration.outdated is not None:
            logger.warning("%s: %s", registration.name, registration.outdated)
        return registration

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        found: dict[str, Topic] = {}
        for _, topics in self._cluster.each_up(lambda shard: shard.registry.topics()):
            for topic in topics:
                found.setdefault(topic.name, topic)
        return [found[name] for name in sorted(found)]

    def topic(self, name: str) -> Topic:
        """One topic, from the first shard that has the topic. Raises `TopicNotFoundError`."""
        return self._first(lambda registry: registry.topic(name))

    def _first(self, read: Callable[[Registry], Topic]) -> Topic:
        """A topic as it is on the first shard that is up and has the topic."""
        if self._lone is not None:
            return read(self._lone)
        errors: list[EventSQLError] = []
        for shard in self._cluster.up():
            try:
                with self._cluster.using(shard):
                    return read(shard.registry)
            except (TopicNotFoundError, DatabaseUnavailableError) as error:
                errors.append(error)
        self._cluster.up()
        raise min(errors, key=lambda error: isinstance(error, DatabaseUnavailableError))

    def check_same(self, name: str) -> None:
        """Compare a topic over the shards that are up, once.

        Raises `TopicNotFoundError`, and `ShardsDifferError` if the shards differ.
        """
        if self._lone is not None or name in self._compared:
            return
        found: dict[str, Topic | None] = {}
        for shard in self._cluster.up():
            if shard.active:
                # Leave out a shard that goes down now.
                with suppress(DatabaseUnavailableError), self._cluster.using(shard):
                    found[shard.label] = _find(shard, name)
        forms = {None if topic is None else topic.partitions for topic in found.values()}
        if forms == {None}:
            self.topic(name)
        if len(forms) > 1:
            differing = ", ".join(f"{_form(topic)} on {shard!r}" for shard, topic in found.items())
            remedy = _completing(name, forms - {None})
            raise ShardsDifferError(
                f"topic {name!r} is not the same on all shards ({differing}): complete it with `{remedy}`",
                remedy=remedy,
            )
        self._compared.add(name)

    @checks_itself
    def cached_topic(self, name: str) -> Topic:
        """As `topic`, from memory if it was looked up within the last seconds."""
        return self._first(lambda registry: registry.cached_topic(name))

    def forget(self, name: str) -> None:
        """Read the topic again at its next use."""
        self._compared.discard(name)
        for shard in self._cluster.shards:
            shard.registry.forget(name)

    def set_retention(self, name: str, retention: Retention | None) -> None:
        """Set how much of a topic is kept; with None, or without a bound, everything for ever.

        The call itself drops nothing. Raises `TopicNotFoundError`.
        """
        self._cluster.fan_out(lambda shard: shard.registry.set_retention(name, retention))

    def set_storage(self, name: str, storage: Storage, *, timeout: Duration = RETRY_SECONDS) -> bool:
        """Store the new events of a topic in `rows` or in `blocks`; False if nothing changes.

        Publishers and consumers go on. The present events stay in their form, until retention drops them: the change
        takes effect at the border of a segment, and nothing is rewritten. Processes of earlier versions can
        still read the topic, and fail when they write to its log. Programs that write to its table themselves, such as
        EventSQL's Java library, are refused.

        Makes other transactions wait for at most a second at a time, and tries for up to `timeout` seconds while they
        read or write the log. Then raises `DatabaseBusyError`, with nothing changed. Raises `TopicNotFoundError`,
        `RegistryError` if an object depends on the log's table, such as a view, and `ValidationError`. With several
        shards, the first may have changed when a later one fails: call this again.
        """
        done = self._cluster.fan_out(lambda shard: shard.registry.set_storage(name, storage, timeout=timeout))
        return any(done.values())

    def set_compression(self, name: str, compression: Compression, *, timeout: Duration = RETRY_SECONDS) -> bool:
        """Compress the new blocks of a topic by `pglz` or `lz4`, or not at all (`none`); False if nothing changes.

        Publishers and consumers go on. The present blocks stay as they are; compaction applies the compression to the
        blocks that it merges. For a topic in rows, the compression applies once its new events are in blocks.

        Makes other transactions wait for at most a second at a time, and tries for up to `timeout` seconds while they
        read or write the log. Then raises `DatabaseBusyError`, with nothing changed. Raises `TopicNotFoundError`,
        `RegistryError` if a server is built without the compression, with nothing changed on any shard, and
        `ValidationError`. With several shards, the first may have changed when a later one fails: call this again.
        """
        self._check_compression(compression)
        done = self._cluster.fan_out(lambda shard: shard.registry.set_compression(name, compression, timeout=timeout))
        return any(done.values())

    def _check_compression(self, compression: Compression | None) -> None:
        """Raise `RegistryError` if one of several servers is built without a compression, before any is changed."""
        if self._lone is None and compression not in {None, UNCOMPRESSED}:
            for shard, found in self._cluster.fan_out(lambda shard: shard.registry.compressions()).items():
                compressing.check_among(compression, found, f"the PostgreSQL server of shard {shard.label!r}")

    def unregister_topic(self, name: str, *, force: bool = False) -> None:
        """Delete a topic with all its events.

        The call waits for a transfer and a consumption that are under way. Raises `TopicNotFoundError`,
        `RegistryError` while the topic has consumers or events, unless `force` is set, `DatabaseBusyError` when
        publishers or readers are in the way, and `ValidationError` in a handler that it would wait for.
        """

        def unregister(shard: Shard) -> None:
            try:
                shard.registry.unregister_topic(name, force=force)
            except TopicNotFoundError:
                if shard is required:
                    raise

        required = self._cluster.lone
        if required is None and all(_find(shard, name) is None for shard in self._cluster.all()):
            # If only some shards have the topic, an earlier attempt stopped in between.
            required = self._cluster.all()[0]
        self._cluster.fan_out(unregister)
        self.forget(name)

    # Consumers

    def register_consumer(self, consumer: Consumer, **settings: Unpack[ConsumerSettings]) -> ClusterRegistry:
        """As `declare_consumer`; gives the registry, for the next registration."""
        self.declare_consumer(consumer, **settings)
        return self

    def declare_consumer(self, consumer: Consumer, **settings: Unpack[ConsumerSettings]) -> Registration:
        """Create `consumer` if it does not exist; returns the changes.

        The offsets of a consumer that exists never move: only a seek moves them. It takes the `max_attempts` and the
        `filter` that are given, from its next batch on, and keeps a setting that is None. `EVERY_EVENT` removes a
        filter; events that the filter left out do not come back. A partitioned consumer that lacks partitions of its
        topic gets them, from their earliest events on.

        `max_attempts` (at least 1, and 5 for a new consumer) is how often an event is tried before it goes to the dead
        letter topic. `start` ("earliest" by default) says where a new consumer begins: at the earliest event, after the
        latest, at the first event from an offset on, or at the first event that entered the log at a time or later.
        `Back` names such a time as a duration before now. A start outside of the log is moved to the nearest end of the
        log. With a `filter`, the consumer's functions get the events that match; its offset moves past the others,
        which count as lag until then. A reader of a claim's range gets all of its events. A new consumer that is `held`
        gets no events until it is released.

        With several shards, `start` may not be an offset. A shard that joined holds a new consumer back until the
        consumer has consumed the older events of the other shards: so it gets the events of a key in order. If a shard
        lacks the consumer, it takes the settings that are not given from another shard.

        Raises `TopicNotFoundError`; `ValidationError` for a partitioned consumer of a topic without partitions, for an
        unusable start or filter, and in a handler that a changed setting would wait for; `RedefinitionError` if the
        consumer exists in the other form.
        """
        if self._lone is not None:
            return self._lone.declare_consumer(consumer, **settings)
        if isinstance(starting_at(settings.get("start", "earliest")), AtOffset):
            raise ValidationError("start: each shard counts offsets by itself: begin at a time, earliest or latest")
        existing = [state for state in self.consumers(consumer.topic) if state.name == consumer.name]
        check_form(consumer, existing)
        having = {state.shard for state in existing}

        def register(shard: Shard) -> Registration:
            given = settings.copy()
            given["held"] = settings.get("held", False) or self._cluster.generation_of(shard) > 0
            if existing and shard.name not in having:
                if given.get("max_attempts") is None:
                    given["max_attempts"] = existing[0].max_attempts
                if given.get("filter") is None:
                    given["filter"] = existing[0].filter
            return shard.registry.declare_consumer(consumer, **given)

        done = self._cluster.fan_out(register)
        self._barriers.settle()
        return merged(list(done.values()))

    def consumers(self, topic: str | None = None) -> list[ConsumerState]:
        """Every consumer partition, of one topic or of all, with its shard if there are several."""
        if self._lone is not None:
            return self._lone.consumers(topic)
        listed = self._cluster.each_up(lambda shard: shard.registry.consumers(topic))
        states = [replace(state, shard=shard.label) for shard, found in listed for state in found]
        return sorted(states, key=lambda state: (state.topic, state.name, state.shard or "", state.partition))

    def consumer(self, topic: str, name: str) -> list[ConsumerState]:
        """The partitions of one consumer. Raises `TopicNotFoundError` or `ConsumerNotFoundError`."""
        if self._lone is not None:
            return self._lone.consumer(topic, name)
        states = [state for state in self.consumers(topic) if state.name == name]
        if not states:
            raise no_consumer(topic, name)
        return states

    def check_same_consumer(self, topic: str, name: str) -> None:
        """Compare a consumer over the shards that are up.

        Raises as `consumer`, and `ShardsDifferError` if the shards differ.
        """
        if self._lone is not None:
            return
        listed = [
            (shard, [state for state in found if state.name == name])
            for shard, found in self._cluster.each_up(lambda shard: shard.registry.consumers(topic))
        ]
        states = [state for _, found in listed for state in found]
        if not states:
            raise no_consumer(topic, name)
        lacking = [shard.label for shard, found in listed if shard.active and not found]
        mixed = len({state.partition == NOT_PARTITIONED for state in states}) > 1
        if lacking or mixed:
            called = f"consumer {name!r} of topic {topic!r}"
            if mixed:
                remedy = advised("consumer delete --execute", topic, name)
                raise ShardsDifferError(
                    f"{called} is partitioned on some shards only: delete it with `{remedy}`, and create it again",
                    remedy=remedy,
                )
            partitioned = "" if states[0].partition == NOT_PARTITIONED else " --partitioned"
            remedy = advised(f"consumer create{partitioned}", topic, name)
            raise ShardsDifferError(
                f"{called} is missing on shard {lacking[0]!r}: complete it with `{remedy}`", remedy=remedy
            )

    def unregister_consumer(self, topic: str, name: str) -> None:
        """Delete a consumer with its offsets.

        Waits for a running consumption. Raises `ValidationError` in a handler that it would wait for.
        """
        if self._lone is not None:
            return self._lone.unregister_consumer(topic, name)
        exists = any(state.name == name for state in self.consumers(topic))

        def unregister(shard: Shard) -> None:
            try:
                shard.registry.unregister_consumer(topic, name)
            except (ConsumerNotFoundError, TopicNotFoundError):
                # If only some shards have the consumer, an earlier attempt stopped in between.
                if not exists:
                    raise

        self._cluster.fan_out(unregister)
        return None

    def pause(self, topic: str, name: str) -> None:
        """Start no consumption of this consumer until `resume`; a running consumption goes on.

        Waits for the transaction of its batch. Raises `ValidationError` in a handler that it would wait for.
        """
        self._cluster.fan_out(lambda shard: shard.registry.pause(topic, name))

    def resume(self, topic: str, name: str) -> None:
        """End a pause. An event that blocks a partition, or that waits, is due at once, with a fresh set of attempts.

        Waits and raises as `pause`.
        """
        self._cluster.fan_out(lambda shard: shard.registry.resume(topic, name))


def _find(shard: Shard, name: str) -> Topic | None:
    try:
        return shard.registry.topic(name)
    except TopicNotFoundError:
        return None


def _completing(topic: str, numbers: Collection[int | None]) -> str:
    """The command that gives a topic the same partitions on all shards, where it has these numbers now."""
    if len(numbers) > 1:
        return f"eventsql topic alter {topic} --partitions {max(filter(None, numbers))}"
    (number,) = numbers
    return f"eventsql topic create {topic}" + ("" if number == NOT_PARTITIONED else f" --partitions {number}")


def _form(topic: Topic | None) -> str:
    if topic is None:
        return "missing"
    return f"{topic.partitions} partitions" if topic.partitioned else "not partitioned"
