"""The log over shards against the model of `tests/log/test_stateful.py`, one for each shard, while shards are added.

After each step the logs, the buffers, the offsets and who is held back are those of the model, on every shard; and what
a consumer was handed of a key is the beginning of what was published of it, in that order, wherever the key has moved.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Event, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ShardSetError, WrongShardError
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.topics.partitioner import default_partition
from eventsql_orchestration.topics.positions import Earliest
from tests.conftest import Administrator
from tests.forms import BUFFERED, in_blocks
from tests.log.test_stateful import SETTINGS, ConsumerModel, Entry, PartitionModel, TopicModel
from tests.shard_keys import shard_of_key

TOPIC = "orders"

FIRST = 2

MOST_SHARDS = 4

WANTED = {
    "added",
    "held back with events",
    "let go",
    "repartitioned with shards that joined",
    "a key that moved to a shard unknown to its publisher",
}
"""What the examples have to come across."""

# Each shard that joins takes some of these.
keys = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", None])
few = st.lists(keys, min_size=1, max_size=8)
consumers = st.sampled_from(["mailer", "fares"])


@dataclass(eq=False)
class ShardModel:
    """A shard: its part of the topic, its consumers, and where its log ended when each later one joined."""

    name: str
    platform: Shard
    topic: TopicModel
    consumers: dict[str, ConsumerModel]
    before: tuple[ShardModel, ...] = ()
    fences: dict[str, int] = field(default_factory=dict)

    def behind(self, consumer: str, fence: int) -> bool:
        """Whether a consumer has something left up to a fence."""
        states = self.consumers[consumer].partitions
        return any(self.topic.in_partition(at, after=state.offset, upto=fence) for at, state in states.items())


class ShardedMachine(RuleBasedStateMachine):
    """Does to the shards what the models do; each example has databases of its own."""

    def __init__(self, administrator: Administrator, met: Counter[str]) -> None:
        """`met` counts what the examples come across."""
        super().__init__()
        self.administrator = administrator
        self.met = met
        self.stack = ExitStack()
        self.values = itertools.count()
        self.drawn = itertools.count(1)
        self.shards: list[ShardModel] = []
        self.published: dict[str, list[int]] = defaultdict(list)
        self.handed: dict[str, list[tuple[str | None, int]]] = defaultdict(list)

    def teardown(self) -> None:
        self.stack.close()

    def _database(self) -> str:
        return self.stack.enter_context(self.administrator.copied())

    def _open(self, dsns: Sequence[str]) -> EventSQL:
        return self.stack.enter_context(EventSQL(*dsns, transfer=False))

    @initialize(partitions=st.sampled_from([1, 3]), wanted=few)
    def begin(self, partitions: int, wanted: list[str | None]) -> None:
        dsns = [self._database() for _ in range(FIRST)]
        self.platform = self._open(dsns)
        self.platform.registry.register_topic(Topic(TOPIC, partitions))
        self.platform.registry.register_consumer(Consumer(TOPIC, "mailer", partitioned=True))
        self.platform.registry.register_consumer(Consumer(TOPIC, "fares"))
        # It goes on by what it knows, until it is told.
        self.other, self.untold = self._open(dsns), list[str]()
        self.other.registry.topic(TOPIC)
        for shard in self.platform.shards:
            self._model(shard, partitions)
        self.publish(wanted, 1)

    def _model(self, shard: Shard, partitions: int, before: tuple[ShardModel, ...] = ()) -> None:
        topic = TopicModel(TOPIC, partitions)
        until = HELD if before else None
        states = {at: PartitionModel(0) for at in range(partitions)}
        whole = {NOT_PARTITIONED: PartitionModel(0)}
        found = {
            "mailer": ConsumerModel(topic, "mailer", states, None, until),
            "fares": ConsumerModel(topic, "fares", whole, None, until),
        }
        assert shard.name is not None
        self.shards.append(ShardModel(shard.name, shard, topic, found, before))

    def _owner(self, key: str) -> ShardModel:
        name = shard_of_key(key, [shard.name for shard in self.shards])
        return next(shard for shard in self.shards if shard.name == name)

    # Publishing

    def _entries(self, wanted: Sequence[str | None]) -> tuple[list[Entry], list[Publication]]:
        entries, publications = [], []
        partitions = self.shards[0].topic.partitions
        for key in wanted:
            value = next(self.values)
            partition = value % partitions
            if key is not None:
                partition = default_partition(Publication(TOPIC, b"", key=key), partitions)
            entries.append(Entry(value, key, partition, drawn=next(self.drawn)))
            publications.append(
                Publication(TOPIC, b"%d" % value, key=key, partition=partition if key is None else None)
            )
        return entries, publications

    def _buffer(self, shard: ShardModel, entries: Sequence[Entry]) -> None:
        shard.topic.buffer += entries
        for entry in entries:
            if entry.key is not None:
                self.published[entry.key].append(entry.value)
        # Where the batch went straight to the log, so did what lay in the buffer.
        if shard.platform.reader.end(TOPIC) > shard.topic.end:
            shard.topic.transfer()

    @rule(wanted=few, times=st.sampled_from([1, 1, 10]))
    def publish(self, wanted: list[str | None], times: int) -> None:
        entries, publications = self._entries(wanted * times)
        assert self.platform.publisher.publish_all(publications) == len(entries)
        keyless = {entry.value for entry in entries if entry.key is None}
        places = [shard for shard in self.shards if keyless & self._values(shard)] if keyless else []
        assert len(places) <= 1, "those without a key go to one shard together"
        for shard in self.shards:
            mine = [
                entry
                for entry in entries
                if (shard in places if entry.key is None else self._owner(entry.key) is shard)
            ]
            self._buffer(shard, mine)

    def _values(self, shard: ShardModel) -> set[int]:
        """The values of the events that a shard has."""
        with shard.platform.database.connection() as connection:
            rows = connection.execute(
                f"SELECT convert_from(eql_value, 'UTF8')::int FROM ({BUFFERED}) AS buffered "
                "UNION ALL SELECT convert_from(eql_value, 'UTF8')::int FROM eventsql.orders_event"
            ).fetchall()
        return {value for (value,) in rows}

    @rule(key=st.sampled_from("abcdefgh"), moved=st.booleans())
    def publish_by_what_another_process_knows(self, key: str, moved: bool) -> None:
        if moved:
            key = next((each for each in "abcdefgh" if self._owner(each).name in self.untold), key)
        entries, publications = self._entries([key])
        shard = self._owner(key)
        if shard.name in self.untold:
            self.met["a key that moved to a shard unknown to its publisher"] += 1
            with pytest.raises(ShardSetError, match=shard.name):
                self.other.publisher.publish(publications[0])
            return
        self.other.publisher.publish(publications[0])
        self._buffer(shard, entries)

    @precondition(lambda self: self.untold)
    @rule()
    def tell_the_other_process(self) -> None:
        for shard in self.shards:
            if shard.name in self.untold:
                self.other.add_url(shard.platform.database.dsn)
        self.untold.clear()

    @rule(key=st.sampled_from("abcdefgh"), place=st.integers(0, MOST_SHARDS - 1), commit=st.booleans())
    def publish_in_transaction(self, key: str, place: int, commit: bool) -> None:
        entries, publications = self._entries([key])
        shard = self.shards[place % len(self.shards)]
        with shard.platform.database.connection() as connection, connection.transaction(force_rollback=not commit):
            if self._owner(key) is not shard:
                with pytest.raises(WrongShardError):
                    self.platform.publisher.publish(publications[0], connection=connection)
                return
            self.platform.publisher.publish(publications[0], connection=connection)
        if commit:
            self._buffer(shard, entries)

    @rule()
    def transfer(self) -> None:
        moved = sum(len(shard.topic.buffer) for shard in self.shards)
        assert self.platform.transfer.run_once() == ({TOPIC: moved} if moved else {})
        for shard in self.shards:
            shard.topic.transfer()
        self._learn()
        self._settle()

    # Changes

    @rule(partitions=st.integers(1, 4))
    def repartition(self, partitions: int) -> None:
        changed = self.platform.repartitioner.repartition(TOPIC, partitions)
        assert (changed is None) == (partitions == self.shards[0].topic.partitions)
        if changed is None:
            return
        self.met["repartitioned with shards that joined"] += len(self.shards) > FIRST
        for shard in self.shards:
            shard.topic.transfer()
        self._learn()
        for shard in self.shards:
            topic, after = shard.topic, shard.platform.layouts.of(TOPIC)[-1].after
            assert after >= topic.end
            topic.layouts = [*(topic.layouts or [(topic.partitions, 0)]), (partitions, after)]
            topic.partitions = partitions
            mailer = shard.consumers["mailer"]
            mailer.until = after if mailer.until is None else mailer.until
            for number in range(partitions):
                mailer.partitions.setdefault(number, PartitionModel(after))

    @precondition(lambda self: len(self.shards) < MOST_SHARDS)
    @rule(told=st.sampled_from([False, False, True]))
    def add_shard(self, told: bool) -> None:
        dsn = self._database()
        with Shard(dsn, transfer=False) as new:
            assert ShardAddition(self.platform.shards, new).execute().active
        self.met["added"] += 1
        self.platform.add_url(dsn)
        shard = self.platform.shards[-1]
        assert shard.name is not None
        for each in self.shards:
            each.topic.transfer()
        self._learn()
        for each in self.shards:
            each.fences[shard.name] = each.topic.end
        self._model(shard, self.shards[0].topic.partitions, tuple(self.shards))
        self.untold.append(shard.name)
        if told:
            self.tell_the_other_process()

    # Consuming

    @rule(name=consumers, most=st.sampled_from([1, 5, 40]))
    def consume(self, name: str, most: int) -> None:
        self._settle()
        expected = sum(self._consume(shard, name, most) for shard in self.shards)

        def handle(events: Sequence[Event], _connection: Connection) -> None:
            self.handed[name] += [(event.key, int(event.value)) for event in events]

        assert self.platform.consumers.consume_once(TOPIC, name, handle, max_events=most) == expected

    def _consume(self, shard: ShardModel, name: str, most: int) -> int:
        consumer, consumed = shard.consumers[name], 0
        while True:
            for number, state in consumer.partitions.items():
                batch = consumer.waiting(number)[:most]
                state.offset, consumed = batch[-1].id if batch else state.offset, consumed + len(batch)
            if consumed or consumer.until == HELD or not consumer.settle():
                return consumed

    @rule(name=consumers)
    def catch_up(self, name: str) -> None:
        self.transfer()
        for _ in range(3):
            self.consume(name, 1_000)

    @rule(name=consumers)
    def seek_to_the_earliest(self, name: str) -> None:
        self.platform.seeker.execute(TOPIC, name, Earliest())
        self.handed[name].clear()
        for shard in self.shards:
            consumer = shard.consumers[name]
            for state in consumer.partitions.values():
                state.offset = 0
            if shard.topic.layouts and name == "mailer":
                consumer.move(0)
            if shard.before:
                consumer.until = HELD
        self._settle()

    def _settle(self) -> None:
        """Release the consumers that have consumed all older shards up to their fences."""
        for shard in self.shards:
            for name, consumer in shard.consumers.items():
                if consumer.until == HELD and not any(
                    each.behind(name, each.fences[shard.name]) for each in shard.before
                ):
                    self.met["let go"] += 1
                    consumer.until = None
                    if name == "mailer" and shard.topic.layouts:
                        least = min(state.offset for state in consumer.partitions.values())
                        consumer.until = shard.topic.until_of(shard.topic.layout_of(least))

    # What holds after each step

    def _learn(self) -> None:
        """From the logs, the models learn the offsets of new events."""
        for shard in self.shards:
            events = shard.platform.reader.read(TOPIC)
            found = [(int(event.value), event.key, event.partition) for event in events]
            if in_blocks():
                shard.topic.place_new([partition for _, _, partition in found])
            assert found == [(entry.value, entry.key, entry.partition) for entry in shard.topic.log]
            for event, entry in zip(events, shard.topic.log, strict=True):
                assert entry.id in (0, event.id)
                entry.id = event.id

    @invariant()
    def all_is_as_the_models_say(self) -> None:
        if not self.shards:
            return
        self._learn()
        self._settle()
        held = {(each.shard, each.consumer) for each in self.platform.held_back()}
        self.met["held back with events"] += any(
            shard.topic.log and consumer.until == HELD for shard in self.shards for consumer in shard.consumers.values()
        )
        assert held == {
            (shard.name, name)
            for shard in self.shards
            for name, consumer in shard.consumers.items()
            if consumer.until == HELD
        }
        buffered = sum(len(shard.topic.buffer) for shard in self.shards)
        assert self.platform.buffered() == ({TOPIC: buffered} if buffered else {})
        for shard in self.shards:
            found = {
                (state.name, state.partition): (state.last_event_id, state.until)
                for state in shard.platform.registry.consumers(TOPIC)
            }
            assert found == {
                (name, number): (state.offset, consumer.until)
                for name, consumer in shard.consumers.items()
                for number, state in consumer.partitions.items()
            }

    @invariant()
    def each_key_is_handed_over_in_its_order_and_once(self) -> None:
        for handed in self.handed.values():
            of_keys: dict[str, list[int]] = defaultdict(list)
            for key, value in handed:
                of_keys[key or ""].append(value)
            for key in of_keys.keys() - {""}:
                assert of_keys[key] == self.published[key][: len(of_keys[key])]


def test_any_sequence_of_operations_leaves_the_log_over_shards_as_the_models_say(administrator: Administrator) -> None:
    met: Counter[str] = Counter()

    class Machine(ShardedMachine):
        def __init__(self) -> None:
            super().__init__(administrator, met)

    run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=6, stateful_step_count=25))
    assert met.keys() == WANTED, "what the examples are for"
    assert min(met.values()) > 0, met
