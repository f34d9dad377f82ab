"""The topics and consumers of all shards: the same on each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseUnavailableError,
    ShardsDifferError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.log.positions import AtOffset, Start, starting_at
from eventsql_orchestration.log.registry import Registry, check_form
from eventsql_orchestration.model import NOT_PARTITIONED, Consumer, ConsumerState, DeclaredFilter, Retention, Topic
from eventsql_orchestration.sharded.everywhere import everywhere
from eventsql_orchestration.sharded.gates import Gates
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members


@checked
class ShardedRegistry(Registry):
    """A `Registry` over shards.

    What changes a definition needs all shards to be reached, and is done on one after the other; where it ends in
    between, doing it again completes it. What only reads leaves out the shards that are down.
    """

    def __init__(self, members: Members, gates: Gates) -> None:
        self._members = members
        self._gates = gates
        self._compared: set[str] = set()

    # Topics

    def register_topic(self, topic: Topic) -> ShardedRegistry:
        everywhere(self._members, lambda member: member.platform.registry.register_topic(topic))
        return self

    def topics(self) -> list[Topic]:
        found: dict[str, Topic] = {}
        for member in self._members.up():
            with self._members.using(member):
                for topic in member.platform.registry.topics():
                    found.setdefault(topic.name, topic)
        return [found[name] for name in sorted(found)]

    def topic(self, name: str) -> Topic:
        """One topic, as the first of the shards has it that has it. Raises `TopicNotFoundError`."""
        missing: list[TopicNotFoundError] = []
        for member in self._members.up():
            try:
                with self._members.using(member):
                    return member.platform.registry.topic(name)
            except TopicNotFoundError as error:
                missing.append(error)
            except DatabaseUnavailableError:
                continue
        self._members.up()
        raise missing[0]

    def check_same(self, name: str) -> None:
        """Compare a topic over the shards that are up, once.

        Raises `TopicNotFoundError`, and `ShardsDifferError` where they do not agree.
        """
        if name in self._compared:
            return
        found: dict[str, Topic | None] = {}
        for member in self._members.up():
            if member.active:
                # One that goes down now says nothing.
                with suppress(DatabaseUnavailableError), self._members.using(member):
                    found[member.name] = _find(member, name)
        forms = {None if topic is None else topic.partitions for topic in found.values()}
        if forms == {None}:
            self.topic(name)
        if len(forms) > 1:
            raise ShardsDifferError(_difference(name, found))
        self._compared.add(name)

    @checks_itself
    def cached_topic(self, name: str) -> Topic:
        for member in self._members.up():
            with self._members.using(member):
                return member.platform.registry.cached_topic(name)
        raise AssertionError("some shard is up, or the members raise")

    @checks_itself
    def known(self, name: str) -> Topic | None:
        return next((found for each in self._members.platforms if (found := each.registry.known(name))), None)

    def forget(self, name: str) -> None:
        self._compared.discard(name)
        for platform in self._members.platforms:
            platform.registry.forget(name)

    def set_retention(self, name: str, retention: Retention | None) -> None:
        everywhere(self._members, lambda member: member.platform.registry.set_retention(name, retention))

    def unregister_topic(self, name: str, *, force: bool = False) -> None:
        def unregister(member: Member) -> None:
            try:
                member.platform.registry.unregister_topic(name, force=force)
            except TopicNotFoundError:
                if member.name == last:
                    raise

        # Where only some shards have it, an attempt before this one ended in between.
        last = self._last_with(name)
        everywhere(self._members, unregister)
        self.forget(name)

    def _last_with(self, name: str) -> str | None:
        """The shard that says so where no shard has the topic."""
        members = self._members.all()
        for member in members:
            try:
                member.platform.registry.topic(name)
            except TopicNotFoundError:
                continue
            return None
        return members[0].name

    # Consumers

    def register_consumer(
        self,
        consumer: Consumer,
        *,
        max_attempts: int | None = None,
        start: Start = "earliest",
        filter: DeclaredFilter = None,  # noqa: A002 - the field's word
        held: bool = False,
    ) -> ShardedRegistry:
        """Create `consumer` on all shards, or find it as it is, as on one.

        On a shard that joined the others, a new one gets no events before it has consumed what was published on the
        others until then, so that it too is handed the events of a key in order. A shard that lacks the consumer gets
        the settings that are not given from another shard.
        """
        if isinstance(starting_at(start), AtOffset):
            raise ValidationError(
                "start: an offset means another place on each shard: begin at a time, earliest or latest"
            )
        existing = [state for state in self.consumers(consumer.topic) if state.name == consumer.name]
        check_form(consumer, existing)
        having = {state.shard for state in existing}

        def register(member: Member) -> None:
            attempts, conditions = max_attempts, filter
            if existing and member.name not in having:
                attempts = existing[0].max_attempts if attempts is None else attempts
                conditions = existing[0].filter if conditions is None else conditions
            member.platform.registry.register_consumer(
                consumer, max_attempts=attempts, start=start, filter=conditions,
                held=held or self._members.generation_of(member) > 0,
            )  # fmt: skip

        everywhere(self._members, register)
        self._gates.settle()
        return self

    def consumers(self, topic: str | None = None) -> list[ConsumerState]:
        """Every consumer partition on the shards that are up, each with its shard."""
        states: list[ConsumerState] = []
        for member in self._members.up():
            with self._members.using(member):
                states += [replace(each, shard=member.name) for each in member.platform.registry.consumers(topic)]
        return sorted(states, key=lambda state: (state.topic, state.name, state.shard or "", state.partition))

    def consumer(self, topic: str, name: str) -> list[ConsumerState]:
        """Its partitions on the shards that are up. Raises `TopicNotFoundError` or `ConsumerNotFoundError`."""
        states = [state for state in self.consumers(topic) if state.name == name]
        if not states:
            raise ConsumerNotFoundError(
                f"topic {topic!r} has no consumer {name!r}: create it with `eventsql consumer create {topic} {name}`"
            )
        return states

    def check_same_consumer(self, topic: str, name: str) -> None:
        """Compare a consumer over the shards that are up.

        Raises as `consumer`, and `ShardsDifferError` where they do not agree.
        """
        states = self.consumer(topic, name)
        on = {state.shard for state in states}
        lacking = [member.name for member in self._members.up() if member.active and member.name not in on]
        mixed = len({state.partition == NOT_PARTITIONED for state in states}) > 1
        if lacking or mixed:
            which = "is partitioned on some shards only" if mixed else f"is missing on shard {lacking[0]!r}"
            raise ShardsDifferError(
                f"consumer {name!r} of topic {topic!r} {which}: complete it with `eventsql consumer create {topic} "
                f"{name}`"
            )

    def unregister_consumer(self, topic: str, name: str) -> None:
        found = {state.shard for state in self.consumers(topic) if state.name == name}

        def unregister(member: Member) -> None:
            if member.name in found or not found:
                member.platform.registry.unregister_consumer(topic, name)

        everywhere(self._members, unregister)

    def pause(self, topic: str, name: str) -> None:
        everywhere(self._members, lambda member: member.platform.registry.pause(topic, name))

    def resume(self, topic: str, name: str) -> None:
        everywhere(self._members, lambda member: member.platform.registry.resume(topic, name))


def _find(member: Member, name: str) -> Topic | None:
    try:
        return member.platform.registry.topic(name)
    except TopicNotFoundError:
        return None


def _difference(name: str, found: dict[str, Topic | None]) -> str:
    forms = ", ".join(f"{_form(topic)} on {shard!r}" for shard, topic in found.items())
    return (
        f"topic {name!r} is not the same on all shards ({forms}): complete it with `eventsql topic create {name} "
        "--partitions N`, or `eventsql topic alter`"
    )


def _form(topic: Topic | None) -> str:
    if topic is None:
        return "missing"
    return f"{topic.partitions} partitions" if topic.partitioned else "not partitioned"
