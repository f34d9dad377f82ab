"""The log against a model of plain lists: any sequence of what may be done to topics and consumers comes to the same.

After each step the logs, the buffer, the offsets, the effects and the lags are those of the model.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consumer import EVERY_EVENT, DeclaredFilter, EventFilter
from eventsql_orchestration.consuming import failures
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.errors import (
    ClaimLostError,
    PartitionLeasedError,
    RedefinitionError,
    RegistryError,
    ValidationError,
)
from eventsql_orchestration.model import STORAGES, Retention, Storage
from eventsql_orchestration.publishing import log_room, log_writer
from eventsql_orchestration.publishing.publisher import STRAIGHT_LEAST
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.storage import compacting, segments
from eventsql_orchestration.topics.partitioner import default_partition
from eventsql_orchestration.topics.positions import AtOffset, Earliest, Latest, Position, ShiftBy

if TYPE_CHECKING:
    from eventsql_orchestration.database import Connection

SETTINGS = settings(
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    # To shrink a failure takes longer than a test may: add Phase.shrink to look for a shorter one.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

MAX_ATTEMPTS = 2

ERASED = -1
"""The value of an erased event for handlers and in the table of effects."""


def value_of(value: bytes | None) -> int:
    return int(value) if value else ERASED


# The model


@dataclass(eq=False)
class Entry:
    """An event: its value is a number of its own, `drawn` its place in the buffer, `id` its offset once it is seen."""

    value: int
    key: str | None
    partition: int
    drawn: int = 0
    id: int = 0
    origin: int = NOT_PARTITIONED
    redriven: bool = False
    erased: bool = False

    @property
    def shown(self) -> int:
        return ERASED if self.erased else self.value

    @property
    def metadata(self) -> dict[str, str]:
        return {"kind": str(self.value % 2)}


@dataclass
class TopicModel:
    name: str
    partitions: int
    log: list[Entry] = field(default_factory=list)
    buffer: list[Entry] = field(default_factory=list)
    last_id: int = 0
    letters: TopicModel | None = None
    layouts: list[tuple[int, int]] = field(default_factory=list)
    """Partitions, and the offset that they come after, once they have changed."""

    def layout_of(self, offset: int) -> int:
        return max(number for number, (_, after) in enumerate(self.layouts) if after <= offset)

    def rows_from(self, layout: int) -> int:
        return max(partitions for partitions, _ in self.layouts[layout:])

    def until_of(self, layout: int) -> int | None:
        return self.layouts[layout + 1][1] if layout + 1 < len(self.layouts) else None

    def in_partition(self, partition: int, *, after: int = 0, upto: int | None = None) -> list[Entry]:
        return [
            entry
            for entry in self.log
            if partition in (NOT_PARTITIONED, entry.partition)
            and entry.id > after
            and (upto is None or entry.id <= upto)
        ]

    @property
    def before(self) -> int:
        return self.log[0].id - 1 if self.log else 0

    @property
    def end(self) -> int:
        return self.log[-1].id if self.log else 0

    def transfer(self) -> None:
        self.log += sorted(self.buffer, key=lambda entry: entry.drawn)
        self.buffer.clear()

    def place_new(self, partitions: Sequence[int]) -> None:
        """Give the events that the log has not shown yet their places, by the partitions of all that it shows.

        A log in blocks keeps the order within each partition, and no order over partitions.
        """
        known = sum(entry.id > 0 for entry in self.log)
        new: dict[int, deque[Entry]] = {}
        for entry in self.log[known:]:
            new.setdefault(entry.partition, deque()).append(entry)
        self.log[known:] = [new[partition].popleft() for partition in partitions[known:]]
        assert not any(new.values())


@dataclass
class PartitionModel:
    """A consumer partition. `claim` is the id of the one that holds it."""

    offset: int
    consumed: int = 0
    failed: int | None = None
    attempts: int = 0
    claim: int | None = None


@dataclass
class ConsumerModel:
    topic: TopicModel
    name: str
    partitions: dict[int, PartitionModel]
    filter: EventFilter | None
    until: int | None = None
    paused: bool = False

    def waiting(self, number: int) -> list[Entry]:
        return self.topic.in_partition(number, after=self.partitions[number].offset, upto=self.until)

    def settle(self) -> bool:
        """Enter the next layout where all has been consumed that this one holds, and nobody leases a partition."""
        if self.until is None or any(self.waiting(number) or state.claim for number, state in self.partitions.items()):
            return False
        entered = max(number for number, (_, after) in enumerate(self.topic.layouts) if after == self.until)
        for number, state in list(self.partitions.items()):
            state.offset = max(state.offset, self.until)
            if number >= self.topic.rows_from(entered):
                del self.partitions[number]
        self.until = self.topic.until_of(entered)
        return True

    def move(self, offset: int) -> None:
        """Give it the rows of a place that all of its partitions have gone to."""
        layout = self.topic.layout_of(offset)
        self.until = self.topic.until_of(layout)
        rows = self.topic.rows_from(layout)
        self.partitions = {number: state for number, state in self.partitions.items() if number < rows}
        for number in range(rows):
            self.partitions.setdefault(number, PartitionModel(offset))

    def matches(self, entry: Entry) -> bool:
        wanted, key = self.filter, entry.key
        return wanted is None or (
            (wanted.keys is None or key in wanted.keys)
            and (wanted.key_prefix is None or (key is not None and key.startswith(wanted.key_prefix)))
            # An erased event has lost its metadata.
            and (not wanted.metadata or (not entry.erased and wanted.metadata == entry.metadata))
        )

    def blocked(self, state: PartitionModel) -> bool:
        return state.failed is not None and state.attempts >= MAX_ATTEMPTS and self.topic.letters is None


@dataclass
class ClaimModel:
    """A claim as its owner knows it, and whether it is still his."""

    claim: Claim
    consumer: ConsumerModel
    partition: int

    @property
    def state(self) -> PartitionModel:
        return self.consumer.partitions[self.partition]


class Transaction:
    """An open transaction of an outbox and what it has published."""

    def __init__(self, dsn: str) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(dsn)
        self.published: list[tuple[TopicModel, Entry]] = []


# What may be done

keys = st.sampled_from(["a", "b", "ab", None])
few = st.lists(keys, min_size=1, max_size=8)
places = st.integers(0, 5)
failing = st.none() | st.integers(0, 6)
filters = st.sampled_from([
    None, None, EVERY_EVENT, EventFilter(keys=frozenset({"a", "ab"})), EventFilter(key_prefix="a"),
    EventFilter(metadata={"kind": "1"}), EventFilter(keys=frozenset("b"), metadata={"kind": "0"}),
])  # fmt: skip


class LogMachine(RuleBasedStateMachine):
    """Does to a database what the model does. One database serves all examples: each has topics of its own."""

    example = itertools.count()

    def __init__(self, platform: EventSQL, dsn: str, storage: Storage, *, changing: bool) -> None:
        super().__init__()
        self.platform = platform
        self.storage = storage
        self.changing = changing
        self.dsn = dsn
        self.prefix = f"t{next(self.example)}"
        self.values = itertools.count()
        self.drawn = itertools.count(1)
        self.topics: list[TopicModel] = []
        self.consumers: list[ConsumerModel] = []
        self.claims: list[ClaimModel] = []
        self.transactions: list[Transaction] = []
        self.effects: list[tuple[str, int]] = []

    def teardown(self) -> None:
        for transaction in self.transactions:
            transaction.connection.close()
        for topic in self.all_topics():
            self.platform.registry.unregister_topic(topic.name, force=True)

    def all_topics(self) -> list[TopicModel]:
        return [*self.topics, *(topic.letters for topic in self.topics if topic.letters is not None)]

    # Topics

    @initialize(partitions=st.sampled_from([-1, 1, 3, 3]), partitioned=st.booleans(), letters=st.booleans(), wanted=few)
    def begin(self, partitions: int, partitioned: bool, letters: bool, wanted: list[str | None]) -> None:
        self._register(partitions)
        self.register_consumer(0, "mailer", partitioned, "earliest", None)
        if letters:
            self._create_dead_letter_topic(self.topics[0])
        self.publish_many(0, wanted)

    @precondition(lambda self: len(self.topics) < 2)
    @rule(partitions=st.sampled_from([-1, 1, 3]))
    def another_topic(self, partitions: int) -> None:
        self._register(partitions)

    def _register(self, partitions: int) -> None:
        topic = TopicModel(f"{self.prefix}_{len(self.topics)}", partitions)
        self.platform.registry.register_topic(Topic(topic.name, partitions, storage=self.storage))
        self.topics.append(topic)

    @rule(
        # What ends what others need comes seldom.
        change=st.sampled_from(
            ["resume", "redrive", "change form", "erase"] * 3
            + ["pause"]
            + ["dead letters", "compress"] * 2
            + ["unregister", "redefine", "delete"]
        ),
        place=places,
        partitions=st.sampled_from([-1, 1, 3]),
        key=keys,
    )
    def administer(self, change: str, place: int, partitions: int, key: str | None) -> None:
        topic = self.topics[place % len(self.topics)]
        consumer = self.consumers[place % len(self.consumers)] if self.consumers else None
        match change:
            case "resume" if consumer is not None:
                self._resume(consumer)
            case "pause" if consumer is not None:
                self.platform.registry.pause(consumer.topic.name, consumer.name)
                consumer.paused = True
            case "redrive" if topic.letters is not None:
                limit = 2 if partitions == 3 else None
                self._redrive(topic, topic.letters, key, limit=limit, again=place == 0)
            # Its vacuum waits for open transactions.
            case "erase" if not self.transactions:
                self._erase(topic, key or "a")
            case "dead letters":
                self._create_dead_letter_topic(topic)
            case "unregister" if consumer is not None:
                self.platform.registry.unregister_consumer(consumer.topic.name, consumer.name)
                self._forget(consumer)
            # An open transaction that has read the log keeps this waiting.
            case "change form" if self.changing and not self.transactions:
                stored = self.platform.registry.topic(topic.name).storage
                assert self.platform.registry.set_storage(topic.name, "rows" if stored == "blocks" else "blocks")
            case "compress" if not self.transactions:
                self.platform.registry.set_compression(topic.name, "pglz" if partitions == 1 else "none")
            # An open transaction that has published keeps these waiting.
            case "redefine" if not self.transactions:
                self._redefine(topic, partitions)
            case "delete" if not self.transactions:
                self._delete_and_create_anew(topic, partitions)

    # An open transaction that has published keeps it waiting.
    @rule(place=places, partitions=st.integers(1, 4), catch_up=st.booleans())
    def repartition(self, place: int, partitions: int, catch_up: bool) -> None:
        partitioned = [topic for topic in self.topics if topic.partitions > 0]
        if self.transactions or not partitioned:
            return
        topic = partitioned[place % len(partitioned)]
        self._repartition(topic, partitions)
        for number, consumer in enumerate(self.consumers):
            if catch_up and consumer.topic is topic:
                self.catch_up(number)

    def _create_dead_letter_topic(self, topic: TopicModel) -> None:
        if topic.letters is None:
            topic.letters = TopicModel(f"{topic.name}_dlt", NOT_PARTITIONED)
        self.platform.registry.register_topic(Topic(topic.letters.name))

    def _repartition(self, topic: TopicModel, partitions: int) -> None:
        changed = self.platform.repartitioner.repartition(topic.name, partitions)
        assert (changed is None) == (partitions == topic.partitions)
        if changed is None:
            return
        topic.transfer()
        self._check_logs()
        assert changed.after >= topic.end
        topic.layouts = [*(topic.layouts or [(topic.partitions, 0)]), (partitions, changed.after)]
        topic.partitions = partitions
        for consumer in self.consumers:
            if consumer.topic is topic and NOT_PARTITIONED not in consumer.partitions:
                consumer.until = changed.after if consumer.until is None else consumer.until
                for number in range(partitions):
                    consumer.partitions.setdefault(number, PartitionModel(changed.after))

    def _redefine(self, topic: TopicModel, partitions: int) -> None:
        used = topic.log or topic.buffer or any(consumer.topic is topic for consumer in self.consumers)
        if partitions != topic.partitions and used:
            if partitions in {each.partitions for each in self.platform.layouts.of(topic.name)}:
                assert self.platform.registry.declare_topic(Topic(topic.name, partitions)).outdated is not None
                return
            with pytest.raises(RedefinitionError):
                self.platform.registry.register_topic(Topic(topic.name, partitions))
            return
        self.platform.registry.register_topic(Topic(topic.name, partitions))
        if partitions != topic.partitions:
            topic.partitions, topic.last_id, topic.layouts = partitions, 0, []

    def _delete_and_create_anew(self, topic: TopicModel, partitions: int) -> None:
        self.platform.registry.unregister_topic(topic.name, force=True)
        if topic.letters is not None:
            # The partitions of its letters' events would be chosen anew, by chance where they have no keys.
            self.platform.registry.unregister_topic(topic.letters.name, force=True)
            topic.letters = None
        for consumer in [consumer for consumer in self.consumers if consumer.topic is topic]:
            self._forget(consumer)
        topic.log, topic.buffer, topic.last_id, topic.partitions, topic.layouts = [], [], 0, partitions, []
        self.platform.registry.register_topic(Topic(topic.name, partitions, storage=self.storage))

    def _erase(self, topic: TopicModel, key: str) -> None:
        letters = topic.letters
        places = topic.log, topic.buffer, [*letters.log, *letters.buffer] if letters is not None else []
        found = [[entry for entry in place if entry.key == key and not entry.erased] for place in places]
        for erasure in (self.platform.eraser.plan(topic.name, [key]), self.platform.eraser.execute(topic.name, [key])):
            assert (erasure.events, erasure.buffered, erasure.dead_letters) == tuple(map(len, found))
        for entry in itertools.chain(*found):
            entry.erased = True
        erased = {entry.id for entry in topic.log if entry.erased}
        for state in self.platform.registry.consumers(topic.name):
            assert state.failed_event_id not in erased or "poison" not in str(state.failure)

    def _redrive(
        self, topic: TopicModel, letters: TopicModel, key: str | None, *, limit: int | None, again: bool
    ) -> None:
        self.platform.transfer.run_once([letters.name])
        letters.transfer()
        chosen = [letter for letter in letters.log if not letter.erased and key in (None, letter.key)]
        redriven = [letter for letter in chosen if again or not letter.redriven][:limit]
        if any(letter.origin >= topic.partitions and letter.key is None for letter in redriven):
            # Their partitions would be chosen anew, by chance.
            return
        entries = [Entry(letter.value, letter.key, letter.origin) for letter in redriven]
        for entry in entries:
            if topic.layouts and entry.key is not None:
                entry.partition = default_partition(Publication(topic.name, b"", key=entry.key), topic.partitions)
        arguments = (topic.name, LetterFilter(key=key))
        plan = self.platform.dead_letters.plan_redrive(*arguments, limit=limit, again=again)
        assert (plan.letters, plan.redrives) == (len(chosen), len(redriven))
        assert self.platform.dead_letters.redrive(*arguments, limit=limit, again=again) == len(redriven)
        self._draw(entries)
        topic.buffer += entries
        for letter in redriven:
            letter.redriven = True

    # Publishing

    def _entries(self, topic: TopicModel, wanted: Sequence[str | None]) -> list[Entry]:
        entries = []
        for key in wanted:
            value = next(self.values)
            partition = value % topic.partitions if topic.partitions > 0 else NOT_PARTITIONED
            if key is not None:
                partition = default_partition(Publication(topic.name, b"", key=key), topic.partitions)
            entries.append(Entry(value, key, partition))
        return entries

    def _publications(self, topic: TopicModel, entries: Sequence[Entry]) -> list[Publication]:
        return [
            Publication(
                topic.name, b"%d" % entry.value, key=entry.key, metadata=entry.metadata,
                partition=entry.partition if entry.key is None else None,
            )
            for entry in entries
        ]  # fmt: skip

    def _draw(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.drawn = next(self.drawn)

    @rule(place=places, wanted=few)
    def publish(self, place: int, wanted: list[str | None]) -> None:
        topic = self.topics[place % len(self.topics)]
        entries = self._entries(topic, wanted)
        self._publish(topic, entries)
        topic.buffer += entries

    def _publish(self, topic: TopicModel, entries: Sequence[Entry], connection: Connection | None = None) -> None:
        publications = self._publications(topic, entries)
        if len(publications) == 1:
            self.platform.publisher.publish(publications[0], connection=connection)
        else:
            assert self.platform.publisher.publish_all(publications, connection=connection) == len(entries)
        self._draw(entries)

    @rule(place=places, wanted=few)
    def publish_many(self, place: int, wanted: list[str | None]) -> None:
        topic = self.topics[place % len(self.topics)]
        entries = self._entries(topic, list(itertools.islice(itertools.cycle(wanted), STRAIGHT_LEAST + len(wanted))))
        self.platform.publisher.publish_all(self._publications(topic, entries))
        self._draw(entries)
        topic.buffer += entries
        # To the log, after what lay in the buffer; where too much does, to the buffer.
        if self.platform.reader.end(topic.name) > topic.end:
            topic.transfer()

    @rule(place=places, wanted=few)
    def publish_in_sql(self, place: int, wanted: list[str | None]) -> None:
        topic = self.topics[place % len(self.topics)]
        # The function chooses the partition of an event without a key by chance.
        entries = self._entries(topic, [key or "a" for key in wanted] if topic.partitions > 0 else wanted)
        with self.platform.database.connection() as connection:
            connection.execute(
                "SELECT eventsql.publish_all(%s, %s::text[], %s::bytea[], %s::json[])",
                (topic.name, [entry.key for entry in entries], [b"%d" % entry.value for entry in entries],
                 [json.dumps(entry.metadata) for entry in entries]),
            )  # fmt: skip
        self._draw(entries)
        topic.buffer += entries

    @rule(transaction=st.integers(0, 1), place=places, wanted=few)
    def publish_in_transaction(self, transaction: int, place: int, wanted: list[str | None]) -> None:
        if transaction >= len(self.transactions):
            self.transactions.append(Transaction(self.dsn))
        opened = self.transactions[min(transaction, len(self.transactions) - 1)]
        topic = self.topics[place % len(self.topics)]
        entries = self._entries(topic, wanted)
        self._publish(topic, entries, opened.connection)
        opened.published += [(topic, entry) for entry in entries]

    @precondition(lambda self: self.transactions)
    @rule(transaction=places, commit=st.booleans())
    def end_transaction(self, transaction: int, commit: bool) -> None:
        opened = self.transactions.pop(transaction % len(self.transactions))
        if commit:
            opened.connection.commit()
            for topic, entry in opened.published:
                topic.buffer.append(entry)
        opened.connection.close()

    @rule(place=st.none() | places)
    def transfer(self, place: int | None) -> None:
        chosen = self.all_topics() if place is None else [self.topics[place % len(self.topics)]]
        expected = {topic.name: len(topic.buffer) for topic in chosen if topic.buffer}
        assert self.platform.transfer.run_once([topic.name for topic in chosen]) == expected
        for topic in chosen:
            topic.transfer()

    # Consumers

    @rule(
        place=places,
        name=st.sampled_from(["mailer", "fares"]),
        partitioned=st.booleans(),
        start=st.sampled_from(["earliest", "latest"]) | st.integers(0, 100),
        only=filters,
    )
    def register_consumer(self, place: int, name: str, partitioned: bool, start: Any, only: DeclaredFilter) -> None:
        topic = self.topics[place % len(self.topics)]
        partitioned = partitioned and topic.partitions > 0
        wanted = range(topic.partitions) if partitioned else (NOT_PARTITIONED,)
        existing = self._consumer(topic, name)
        consumer = Consumer(topic.name, name, partitioned=partitioned)
        options = {"max_attempts": MAX_ATTEMPTS, "start": start, "filter": only}
        if existing is not None and (NOT_PARTITIONED not in existing.partitions) != partitioned:
            with pytest.raises(RedefinitionError):
                self.platform.registry.register_consumer(consumer, **options)
            return
        self.platform.registry.register_consumer(consumer, **options)
        if existing is not None:
            # A filter that is not declared stays.
            if only is not None:
                existing.filter = only if isinstance(only, EventFilter) else None
            return
        match start:
            case "earliest":
                offset = 0
            case "latest":
                offset = topic.end
            case _:
                offset = min(max(start - 1, 0, topic.before), topic.end)
        partitions = {partition: PartitionModel(offset) for partition in wanted}
        chosen = only if isinstance(only, EventFilter) else None
        self.consumers.append(ConsumerModel(topic, name, partitions, chosen))
        if partitioned and topic.layouts:
            self.consumers[-1].move(offset)

    def _consumer(self, topic: TopicModel, name: str) -> ConsumerModel | None:
        found = [each for each in self.consumers if each.topic is topic and each.name == name]
        return found[0] if found else None

    def _forget(self, consumer: ConsumerModel) -> None:
        self.consumers.remove(consumer)
        for state in consumer.partitions.values():
            state.claim = None

    def _resume(self, consumer: ConsumerModel) -> None:
        self.platform.registry.resume(consumer.topic.name, consumer.name)
        consumer.paused = False
        for state in consumer.partitions.values():
            state.failed, state.attempts = None, 0

    def _handler(self, consumer: ConsumerModel, poison: int | None) -> Callable[[Sequence[Event], Connection], None]:
        name = f"{consumer.topic.name} {consumer.name}"

        def handle(events: Sequence[Event], connection: Connection) -> None:
            for event in events:
                value = value_of(event.value)
                connection.execute("INSERT INTO effects (consumer, value) VALUES (%s, %s)", (name, value))
                if event.id == poison:
                    raise ValueError(f"poison {value}")

        return handle

    def _handle(
        self, consumer: ConsumerModel, state: PartitionModel, entries: Sequence[Entry], poison: int | None
    ) -> tuple[int, int, str | None]:
        """What a batch comes to: events consumed and passed over, and what became of the one at the offset `poison`."""
        done = passed = 0
        for entry in entries:
            if not consumer.matches(entry):
                passed += 1
            elif entry.id != poison:
                done += 1
                self.effects.append((f"{consumer.topic.name} {consumer.name}", entry.shown))
            else:
                attempts = (state.attempts if state.failed == entry.id else 0) + 1
                state.consumed += done
                if attempts < MAX_ATTEMPTS or consumer.topic.letters is None:
                    state.failed, state.attempts = entry.id, attempts
                    return done, passed, "kept"
                letter = Entry(entry.value, entry.key, NOT_PARTITIONED, origin=entry.partition, erased=entry.erased)
                self._draw([letter])
                consumer.topic.letters.buffer.append(letter)
                state.offset, state.consumed, state.failed, state.attempts = entry.id, state.consumed + 1, None, 0
                return done + 1, passed, "buried"
            state.offset = entry.id
        state.consumed += done
        state.failed, state.attempts = None, 0
        return done, passed, None

    def _poison(self, consumer: ConsumerModel, entries: Sequence[Entry], place: int | None) -> int | None:
        matching = [entry.id for entry in entries if consumer.matches(entry)]
        return matching[place] if place is not None and place < len(matching) else None

    @precondition(lambda self: self.consumers)
    @rule(place=places, partition=places, most=st.integers(1, 40))
    def consume(self, place: int, partition: int, most: int) -> None:
        self._consume(place, partition, most, None)

    @precondition(lambda self: self.consumers)
    @rule(place=places, partition=places, most=st.integers(1, 40), fails=st.integers(0, 3), times=st.integers(1, 3))
    def consume_and_fail(self, place: int, partition: int, most: int, fails: int, times: int) -> None:
        consumer, number, _ = self._choose(place, partition)
        poison = self._poison(consumer, consumer.waiting(number), fails)
        for _ in range(times):
            self._consume(place, partition, most, poison)

    @precondition(lambda self: self.consumers)
    @rule(place=places)
    def catch_up(self, place: int) -> None:
        self.transfer(None)
        # What was moved is consumed by its offset, which the model does not know yet.
        self._check_logs()
        for partition in range(len(self.consumers[place % len(self.consumers)].partitions)):
            self._consume(place, partition, 1_000, None)
            self._consume(place, partition, 1_000, None)

    def _consume(self, place: int, partition: int, most: int, poison: int | None) -> None:
        consumer, number, state = self._choose(place, partition)
        expected = 0
        while state.claim is None and not consumer.paused and not consumer.blocked(state):
            batch = consumer.waiting(number)[:most]
            if not batch:
                if consumer.settle() and number in consumer.partitions:
                    continue
                break
            expected, passed, failure = self._handle(consumer, state, batch, poison)
            if expected or failure or not passed:
                break
        consumed = self.platform.consumers.consume_once(
            consumer.topic.name, consumer.name, self._handler(consumer, poison), partition=number, max_events=most
        )
        assert consumed == expected

    def _choose(self, place: int, partition: int) -> tuple[ConsumerModel, int, PartitionModel]:
        consumer = self.consumers[place % len(self.consumers)]
        numbers = list(consumer.partitions)
        number = numbers[partition % len(numbers)]
        return consumer, number, consumer.partitions[number]

    # Claims

    @precondition(lambda self: self.consumers)
    @rule(place=places, partition=places, most=st.integers(1, 40))
    def claim(self, place: int, partition: int, most: int) -> None:
        consumer, number, state = self._choose(place, partition)
        claim = self.platform.claims.claim(
            consumer.topic.name, consumer.name, number, owner="one", max_events=most, lease=3_600.0
        )
        free = state.claim is None and not consumer.paused and not consumer.blocked(state)
        if free and not consumer.waiting(number):
            consumer.settle()
        waiting = consumer.waiting(number)[:most] if number in consumer.partitions else []
        if not free or not waiting:
            assert not isinstance(claim, Claim)
            return
        assert isinstance(claim, Claim)
        assert (claim.range.after, claim.range.upto, claim.events) == (state.offset, waiting[-1].id, len(waiting))
        self._hold(claim, consumer, number)

    def _hold(self, claim: Claim, consumer: ConsumerModel, number: int) -> None:
        # The former owner of the partition knows nothing of it yet.
        consumer.partitions[number].claim = claim.epoch
        self.claims.append(ClaimModel(claim, consumer, number))

    def _held(self, held: ClaimModel) -> bool:
        if held.consumer not in self.consumers or held.partition not in held.consumer.partitions:
            return False
        return held.state.claim == held.claim.epoch

    @precondition(lambda self: self.claims)
    @rule(place=places)
    def adopt(self, place: int) -> None:
        held = self.claims[place % len(self.claims)]
        if not self._held(held):
            # Another owner of the same claim may have it.
            if not any(self._held(other) and other.claim.id == held.claim.id for other in self.claims):
                with pytest.raises(ClaimLostError):
                    self.platform.claims.adopt(held.claim.id, owner="two", lease=3_600.0)
            return
        adopted = self.platform.claims.adopt(held.claim.id, owner="two", lease=3_600.0)
        assert adopted.position == held.state.offset
        assert adopted.epoch > held.claim.epoch
        self._hold(adopted, held.consumer, held.partition)

    @precondition(lambda self: self.claims)
    @rule(place=places, batch=st.integers(1, 20), fails=failing)
    def process(self, place: int, batch: int, fails: int | None) -> None:
        held = self.claims.pop(place % len(self.claims))
        claim, consumer = held.claim, held.consumer
        if not self._held(held):
            with pytest.raises(ClaimLostError):
                self.platform.claims.process(claim, self._handler(consumer, None), batch=batch, lease=3_600.0)
            return
        topic, state = consumer.topic, held.state
        poison = self._poison(
            consumer, topic.in_partition(held.partition, after=state.offset, upto=claim.range.upto), fails
        )
        consumed, failure = 0, None
        while state.offset < claim.range.upto and failure != "kept":
            entries = topic.in_partition(held.partition, after=state.offset, upto=claim.range.upto)[:batch]
            done, _, failure = self._handle(consumer, state, entries, poison)
            consumed += done
            if failure is None and len(entries) < batch:
                state.offset = claim.range.upto
        state.claim = None
        processed = self.platform.claims.process(claim, self._handler(consumer, poison), batch=batch, lease=3_600.0)
        assert processed.consumed == consumed
        assert (processed.failure is not None) == (failure is not None)

    @precondition(lambda self: self.claims)
    @rule(place=places)
    def commit_with_effects(self, place: int) -> None:
        held = self.claims.pop(place % len(self.claims))
        claim, consumer = held.claim, held.consumer
        if not self._held(held):
            with pytest.raises(ClaimLostError):
                self.platform.claims.read(claim)
            with pytest.raises(ClaimLostError), self.platform.database.transaction() as connection:
                self.platform.claims.commit(connection, claim)
            return
        entries = consumer.topic.in_partition(held.partition, after=held.state.offset, upto=claim.range.upto)
        matching = [entry.shown for entry in entries if consumer.matches(entry)]
        with self.platform.database.transaction() as connection:
            events = self.platform.claims.read(claim)
            assert [value_of(event.value) for event in events] == matching
            self._handler(consumer, None)(events, connection)
            self.platform.claims.commit(connection, claim, consumed=len(events))
        self.effects += [(f"{consumer.topic.name} {consumer.name}", value) for value in matching]
        state = held.state
        state.offset, state.consumed = claim.range.upto, state.consumed + len(matching)
        state.failed, state.attempts, state.claim = None, 0, None

    @precondition(lambda self: self.claims)
    @rule(place=places)
    def release(self, place: int) -> None:
        held = self.claims.pop(place % len(self.claims))
        assert self.platform.claims.release(held.claim) == self._held(held)
        if self._held(held):
            held.state.claim = None

    # Consuming in SQL

    @precondition(lambda self: self.consumers)
    @rule(
        place=places,
        most=st.integers(1, 40),
        ending=st.sampled_from(["commit", "commit", "commit a part", "fail", "fail", "release", "keep"]),
        part=st.integers(0, 6),
    )
    def consume_in_sql(self, place: int, most: int, ending: str, part: int) -> None:
        consumer = self.consumers[place % len(self.consumers)]
        if consumer.filter is not None:
            # One call passes over what it finds in 20 looks, each further than the one before.
            most = max(most, 20)
        with self.platform.database.connection() as connection:
            rows = connection.execute(
                "SELECT claim, epoch, partition, id, value FROM eventsql.fetch(%s, %s, %s, 3600)",
                (consumer.topic.name, consumer.name, most),
            ).fetchall()
        found = self._has_ready(consumer) or (consumer.settle() and self._has_ready(consumer))
        assert bool(rows) == found
        if not rows:
            return

        number = rows[0][2] if NOT_PARTITIONED not in consumer.partitions else NOT_PARTITIONED
        state = consumer.partitions[number]
        self._learn_passed(consumer, number)
        waiting = consumer.waiting(number)
        entries = waiting[: 1 if state.failed is not None else most]
        if not any(map(consumer.matches, entries)):
            passed = list(itertools.takewhile(lambda entry: not consumer.matches(entry), waiting))
            self._pass(state, passed)
            entries = waiting[len(passed) :][:most]
        assert state.claim is None
        assert not consumer.blocked(state)
        assert [(id_, value_of(value)) for *_, id_, value in rows] == [
            (entry.id, entry.shown) for entry in entries if consumer.matches(entry)
        ]
        self._end_in_sql(consumer, number, rows[0][:2], entries, ending=ending, part=part)

    def _has_ready(self, consumer: ConsumerModel) -> bool:
        """Whether a partition has an event that the filter takes. If none has, they all pass over their events."""
        ready = [
            (state, consumer.waiting(number))
            for number, state in consumer.partitions.items()
            if state.claim is None and not consumer.paused and not consumer.blocked(state)
        ]
        if any(consumer.matches(entry) for _, waiting in ready for entry in waiting):
            return True
        for state, waiting in ready:
            self._pass(state, waiting)
        return False

    def _learn_passed(self, consumer: ConsumerModel, number: int) -> None:
        """Learn which partitions the call has looked at before it came to this one."""
        for found in self.platform.registry.consumer(consumer.topic.name, consumer.name):
            state = consumer.partitions[found.partition]
            if found.partition != number and found.last_event_id != state.offset:
                waiting = consumer.waiting(found.partition)
                assert state.claim is None
                assert not any(map(consumer.matches, waiting))
                self._pass(state, waiting)

    def _pass(self, state: PartitionModel, entries: Sequence[Entry]) -> None:
        """Pass over events in SQL, which counts them as consumed."""
        if entries:
            state.offset, state.consumed = entries[-1].id, state.consumed + len(entries)
            state.failed, state.attempts = None, 0

    def _end_in_sql(
        self, consumer: ConsumerModel, number: int, claim: tuple[int, int], entries: list[Entry],
        *, ending: str, part: int,
    ) -> None:  # fmt: skip
        if ending == "keep":
            # Another owner goes on with it, by the library.
            self._hold(self.platform.claims.get(claim[0])[0], consumer, number)
            return
        state, poison = consumer.partitions[number], None
        statement, given = f"SELECT eventsql.{ending}(%s, %s)", [*claim]
        if ending in ("commit a part", "fail"):
            matching = [entry.id for entry in entries if consumer.matches(entry)]
            last = matching[min(part, len(matching) - 1)]
            entries = [entry for entry in entries if entry.id <= last]
            statement, given = "SELECT eventsql.commit(%s, %s, %s)", [*claim, last]
        if ending == "fail":
            poison = entries[-1].id
            statement = "SELECT eventsql.fail(%s, %s, %s, 'poison')"
        with self.platform.database.transaction() as connection:
            if ending != "release":
                effect = "INSERT INTO effects (consumer, value) VALUES (%s, %s)"
                whose = f"{consumer.topic.name} {consumer.name}"
                done = [(whose, entry.shown) for entry in entries if consumer.matches(entry) and entry.id != poison]
                with connection.cursor() as cursor:
                    cursor.executemany(effect, done)
            connection.execute(statement.encode(), given)
            # A failed event is due again at once, as in the library here.
            connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() WHERE eql_retry_at > now()")
        if ending != "release":
            _, passed, _ = self._handle(consumer, state, entries, poison)
            state.consumed += passed

    # Seeking and retention

    @precondition(lambda self: self.consumers)
    @rule(
        place=places,
        partition=st.none() | places,
        position=st.sampled_from([Earliest(), Latest()])
        | st.integers(0, 300).map(AtOffset)
        | st.integers(-50, 50).filter(bool).map(ShiftBy),
        force=st.booleans(),
    )
    def seek(self, place: int, partition: int | None, position: Position, force: bool) -> None:
        consumer = self.consumers[place % len(self.consumers)]
        numbers = list(consumer.partitions)
        number = None if partition is None else numbers[partition % len(numbers)]
        chosen = {at: state for at, state in consumer.partitions.items() if number in (None, at)}
        arguments = (consumer.topic.name, consumer.name, position)
        if not force and any(state.claim is not None for state in chosen.values()):
            with pytest.raises(PartitionLeasedError):
                self.platform.seeker.execute(*arguments, partition=number)
            return
        targets = {at: _target(consumer.topic, at, state.offset, position) for at, state in chosen.items()}
        whole, layouts = len(chosen) == len(consumer.partitions), consumer.topic.layouts
        if layouts and NOT_PARTITIONED not in consumer.partitions:
            until = consumer.until
            stands = max((after for _, after in layouts if until is None or after < until), default=0)
            places_in = {consumer.topic.layout_of(target) for target in targets.values()}
            if len(places_in | (set() if whole else {consumer.topic.layout_of(stands)})) > 1:
                with pytest.raises(ValidationError):
                    self.platform.seeker.execute(*arguments, partition=number, force=force)
                return
        moves = {
            move.partition: move for move in self.platform.seeker.execute(*arguments, partition=number, force=force)
        }
        assert moves.keys() == chosen.keys()
        for at, state in chosen.items():
            target = targets[at]
            between = consumer.topic.in_partition(at, after=min(target, state.offset), upto=max(target, state.offset))
            counts = (len(between), 0) if target < state.offset else (0, len(between))
            move = moves[at]
            assert (move.offset, move.target, (move.again, move.skipped)) == (state.offset, target, counts)
            state.offset, state.failed, state.attempts, state.claim = target, None, 0, None
        if layouts and whole and NOT_PARTITIONED not in consumer.partitions:
            consumer.move(min(targets.values()))

    @rule(
        place=places,
        # Each event is older than a microsecond.
        retention=st.sampled_from([*(Retention(events=most) for most in (1, 20, 60)), Retention(seconds=1e-6)]),
        force=st.sampled_from([False, False, True]),
        wanted=few,
    )
    def retain(self, place: int, retention: Retention, force: bool, wanted: list[str | None]) -> None:
        topic = self.topics[place % len(self.topics)]
        self.platform.registry.set_retention(topic.name, retention)
        # The first run closes the segment that is written to, which can be dropped once another holds events.
        self._retain(topic, retention.events or 0, force=force)
        self.publish(place, wanted)
        self.transfer(None)
        self._check_logs()
        self._retain(topic, retention.events or 0, force=force)

    def _retain(self, topic: TopicModel, events: int, *, force: bool) -> None:
        (dropped,) = self.platform.retention.run_once([topic.name], force=force)
        left = {event.id for event in self.platform.reader.read(topic.name)}
        gone = [entry for entry in topic.log if entry.id not in left]
        assert gone == topic.log[: len(gone)], "from the start of the log, and without holes"
        assert not gone or len(left) >= events
        assert not gone or dropped.upto == gone[-1].id
        for consumer in self.consumers:
            for number, state in consumer.partitions.items():
                unread = consumer.topic is topic and consumer.topic.in_partition(number, after=state.offset)
                assert force or not unread or not gone or unread[0].id > gone[-1].id, "dropped before it was read"
        del topic.log[: len(gone)]

    @precondition(lambda self: self.storage == "blocks" or self.changing)
    @rule(place=places)
    def compact(self, place: int) -> None:
        topic = self.topics[place % len(self.topics)]
        if self.platform.registry.topic(topic.name).storage == "rows":
            with pytest.raises(RegistryError):
                self.platform.compactor.execute(topic.name)
            return
        compacted = self.platform.compactor.execute(topic.name)
        assert compacted.blocks >= 4 * (compacted.into or 0)

    # What holds after each step

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        # The logs come first: from them, the model learns the offsets of new events.
        self._check_logs()
        self._check_buffers()
        self._check_effects()
        self._check_offsets()
        self._check_lags()

    def _check_logs(self) -> None:
        for topic in self.all_topics():
            events = self.platform.reader.read(topic.name)
            if self.storage == "blocks" or self.changing:
                topic.place_new([event.partition for event in events])
            found = [(value_of(event.value), event.key, event.partition) for event in events]
            assert found == [(entry.shown, entry.key, entry.partition) for entry in topic.log]
            assert not any("poison" in str(event.metadata) for event in events if event.erased)
            for event, entry in zip(events, topic.log, strict=True):
                if entry.id == 0:
                    assert event.id > topic.last_id
                    entry.id = topic.last_id = event.id
                assert event.id == entry.id

    def _check_buffers(self) -> None:
        found = self.platform.buffered()
        assert {topic.name: found.get(topic.name, 0) for topic in self.all_topics()} == {
            topic.name: len(topic.buffer) for topic in self.all_topics()
        }

    def _check_effects(self) -> None:
        with self.platform.database.connection() as connection:
            found = connection.execute(
                "SELECT consumer, value FROM effects WHERE starts_with(consumer, %s) ORDER BY id", (f"{self.prefix}_",)
            ).fetchall()
        assert found == self.effects

    def _check_offsets(self) -> None:
        for topic in self.topics:
            found = {
                (state.name, state.partition): (
                    state.last_event_id, state.consumed_events, state.failed_event_id, state.attempts,
                    state.lease_owner is not None, state.until, state.paused,
                )
                for state in self.platform.registry.consumers(topic.name)
            }  # fmt: skip
            assert found == {
                (consumer.name, number): (
                    state.offset, state.consumed, state.failed, state.attempts, state.claim is not None, consumer.until,
                    consumer.paused,
                )
                for consumer, number, state in self._states(topic)
            }  # fmt: skip

    def _check_lags(self) -> None:
        for topic in self.topics:
            found = {(lag.consumer, lag.partition): lag.events for lag in self.platform.lag(topic.name)}
            assert found == {
                (consumer.name, number): len(topic.in_partition(number, after=state.offset))
                + sum(number in (NOT_PARTITIONED, entry.partition) for entry in topic.buffer)
                for consumer, number, state in self._states(topic)
            }

    def _states(self, topic: TopicModel) -> Iterator[tuple[ConsumerModel, int, PartitionModel]]:
        for consumer in self.consumers:
            if consumer.topic is topic:
                for number, state in consumer.partitions.items():
                    yield consumer, number, state


def _target(topic: TopicModel, partition: int, offset: int, position: Position) -> int:
    match position:
        case Earliest():
            return topic.before
        case Latest():
            return topic.end
        case AtOffset(offset=asked):
            return min(max(asked - 1, 0, topic.before), topic.end)
        case ShiftBy(events=events) if events > 0:
            further = topic.in_partition(partition, after=offset)
            return further[events - 1].id if len(further) >= events else max(offset, topic.end)
        case ShiftBy(events=events):
            earlier = topic.in_partition(partition, upto=offset)
            return earlier[events].id - 1 if len(earlier) >= -events else min(offset, topic.before)
    raise AssertionError(position)


@pytest.mark.parametrize(
    ("form", "examples"),
    [
        ("rows", 2),
        ("blocks", 2),
        ("changing", 2),
        *(pytest.param(form, 60, marks=pytest.mark.nightly) for form in (*STORAGES, "changing")),
    ],
)
def test_any_sequence_of_operations_leaves_the_log_as_the_model_says(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, examples: int, form: str
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 100)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    # One transaction appends fewer events than two segments hold.
    monkeypatch.setattr(log_writer, "MOST_BUFFERED", 60)
    transfer = Transfer(platform.database, batch=50)
    monkeypatch.setattr(platform, "transfer", transfer)
    monkeypatch.setattr(compacting, "WINDOW_IDS", 20)
    # A failed event is due again at once.
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.0)
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, value int)")

    class Machine(LogMachine):
        def __init__(self) -> None:
            super().__init__(platform, dsn, "blocks" if form == "blocks" else "rows", changing=form == "changing")

    try:
        run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=examples))
    finally:
        transfer.close()
