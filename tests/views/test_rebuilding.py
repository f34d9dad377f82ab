"""A rebuilt view is what the consumed events say, without a gap or a double beside a consumer that goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import (
    AtOffset,
    Connection,
    Consumer,
    Event,
    EventFilter,
    EventSQL,
    Publication,
    Retention,
    Topic,
)
from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, ViewConflictError
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.views import (
    Definition,
    LogEntry,
    Logs,
    Rollup,
    RollupEntry,
    RollupView,
    Timeline,
    TimelineView,
    ViewComparison,
    ViewFeed,
    ViewFilling,
    Views,
)
from eventsql_orchestration.views import rebuilding as rebuilding_module
from eventsql_orchestration.views.comparison import comparison
from eventsql_orchestration.views.rebuilding import Rebuilding
from eventsql_orchestration.views.sketches import sketch_distinct, sketch_quantiles
from eventsql_orchestration.views.switching import Shadow
from tests.fixtures import Sessions, Until, UntilBlocked
from tests.views.conftest import DAY, MINUTE, NOON, SKETCHES
from tests.waiting import PATIENCE

TOPIC, CONSUMER = "moves", "views"


class Feed(ViewFeed):
    topic, consumer = TOPIC, CONSUMER


class Steps(Feed):
    view = Timeline("steps")

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        view.append(connection, [(event.key, {"minutes": at}, NOON + at * MINUTE) for event, at in read(events)])


class Counts(Feed):
    view = Rollup(
        "counts", MINUTE, ("resource",), ("minutes",),
        distinct=("digits",) * SKETCHES, quantiles=("minutes",) * SKETCHES, indexed=("resource",),
    )  # fmt: skip

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        entries = [
            RollupEntry(
                NOON + at * MINUTE,
                {"resource": event.key or ""},
                {"minutes": at},
                {"digits": str(at)} if SKETCHES else {},
            )
            for event, at in read(events)
        ]
        view.add(connection, entries, slot=events[0].partition)


class Lines(Feed):
    view = Logs("lines")

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        view.write(
            connection, [LogEntry(event.key or "", f"line {at}", NOON + at * MINUTE) for event, at in read(events)]
        )


class Undoing(Steps):
    """Has no effect in the end."""

    def __init__(self, how: str) -> None:
        self.how = how

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> Any:
        if self.how == "coroutine":
            return self.later()
        super().apply(events, view, connection)
        if self.how == "rolled back":
            raise psycopg.Rollback
        return connection.execute("ROLLBACK")

    async def later(self) -> None: ...


FEEDS: tuple[Feed, ...] = (Steps(), Counts(), Lines())


def read(events: Sequence[Event]) -> list[tuple[Event, int]]:
    return [(event, json.loads(event.value)) for event in events]


def prepare(platform: EventSQL) -> None:
    """Make what a `World` uses."""
    Views(platform.database).declare(*(feed.view for feed in FEEDS))
    platform.registry.register_topic(Topic(TOPIC, partitions=2))
    platform.registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True))


pytestmark = pytest.mark.prepared.with_args(prepare)


class World:
    """A topic of two partitions, and a consumer that writes three views."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform, self.views = platform, Views(platform.database)
        self.feeds: Sequence[Feed] = FEEDS

    def publish(self, *minutes: int, keys: str = "abcd") -> None:
        self.platform.publisher.publish_all(
            [Publication(TOPIC, json.dumps(at).encode(), key=keys[at % len(keys)]) for at in minutes]
        )
        self.platform.transfer.run_once()

    def write(self, events: Sequence[Event], connection: Connection) -> None:
        for feed in self.feeds:
            feed.apply(events, self.views.open(feed.view.name), connection)

    def consume(
        self, handler: Callable[..., None] | None = None, *, most: int = 100, partition: int | None = None
    ) -> int:
        wanted = (0, 1) if partition is None else (partition,)
        return sum(
            self.platform.consumers.consume_once(
                TOPIC, CONSUMER, handler or self.write, partition=each, max_events=most
            )
            for each in wanted
        )  # fmt: skip

    def spoil(self) -> None:
        with self.platform.database.connection() as connection:
            connection.execute("DELETE FROM eventsql.view_steps WHERE eql_resource = 'a'")
            connection.execute("UPDATE eventsql.view_counts SET eql_count = eql_count + 7")
            connection.execute("DELETE FROM eventsql.view_lines WHERE eql_resource = 'b'")

    def rows(self, name: str) -> list[Any]:
        """The entries of a view, in an order of their own."""
        opened = self.views.open(name)
        if isinstance(opened, TimelineView):
            return [(each.resource, each.data["minutes"]) for key in "abcd" for each in opened.read(key)]
        if isinstance(opened, RollupView):
            return [
                (each.bucket, each.dimensions, each.count, each.values, each.distinct, each.quantiles)
                for each in opened.read()
            ]
        return sorted(each.line for each in opened.search(limit=10_000))

    def leftovers(self) -> list[str]:
        with self.platform.database.connection() as connection:
            found = connection.execute(
                "SELECT relname FROM pg_class WHERE relname LIKE 'view_rebuild%' AND relkind IN ('r', 'p')"
            )
            return [name for (name,) in found]

    def check(self) -> None:
        assert self.leftovers() == []
        for feed in self.feeds:
            assert self.views.compare(feed) == ViewComparison(feed.view.name, 0, 0)
        assert [len(self.views.definitions()), self.leftovers()] == [3, []]


@pytest.fixture
def world(platform: EventSQL) -> World:
    return World(platform)


@contextmanager
def in_thread(play: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Runs `play` beside the block, and waits for it; its error, if any, is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            play()
        except BaseException as error:  # noqa: BLE001 - raised by the test's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield errors
    thread.join(PATIENCE)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_a_comparison_finds_sketches_that_differ_and_a_rebuild_mends_them(world: World, database: Database) -> None:
    world.publish(*range(8))
    world.consume()
    wanted = world.rows("counts")
    for name, other in (
        ("eql_distinct_digits", sketch_distinct(["1", "other"])),
        ("eql_quantiles_minutes", sketch_quantiles([9.0])),
    ):
        with database.connection() as connection:
            spoiled = connection.execute(
                sql.SQL("UPDATE eventsql.view_counts SET {} = %s WHERE eql_bucket = %s").format(sql.Identifier(name)),
                [other, NOON + MINUTE],
            )
            assert spoiled.rowcount == 1
        compared = world.views.compare(Counts())
        assert (compared.missing, compared.surplus, len(compared.examples)) == (1, 1, 1)
        world.views.rebuild(Counts())
        assert world.rows("counts") == wanted
    world.check()


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_a_rebuild_gives_sketches_to_entries_from_before_their_declaration(world: World, database: Database) -> None:
    world.publish(*range(8))
    world.consume()
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.view_counts SET eql_distinct_digits = NULL, eql_quantiles_minutes = NULL")
    assert world.views.compare(Counts()).missing == 8
    world.views.rebuild(Counts())
    world.check()


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.view.name)
def test_a_rebuild_mends_a_view_and_goes_on(world: World, feed: Feed) -> None:
    world.publish(*range(40))
    world.consume(most=7)
    wanted, told = [], list[int]()
    for _ in range(2):
        world.consume(most=3)
    wanted = world.rows(feed.view.name)
    world.spoil()
    comparison = world.views.compare(feed)
    assert comparison.missing + comparison.surplus
    assert comparison.examples
    assert not comparison.equal

    applied = world.views.rebuild(feed, batch=4, on_progress=told.append)
    assert world.rows(feed.view.name) == wanted
    assert (applied, told) == (26, sorted(told))
    assert len(told) > 3
    assert world.leftovers() == []
    for other in FEEDS:
        world.views.rebuild(other)
    world.consume()
    world.check()
    world.publish(50)
    world.consume()
    world.check()


@pytest.mark.parametrize("how", ["coroutine", "rolled back", "ROLLBACK"])
def test_a_feed_whose_entries_are_not_written_replaces_nothing(world: World, how: str) -> None:
    world.publish(*range(8))
    world.consume()
    wanted = world.rows("steps")
    for take in (world.views.compare, world.views.rebuild):
        with pytest.raises((TypeError, DatabaseError)):
            take(Undoing(how))
    assert world.rows("steps") == wanted
    assert world.leftovers() == []


def test_a_handler_that_commits_late_is_in_the_rebuilt_view_once(world: World, until_blocked: UntilBlocked) -> None:
    world.publish(*range(10))
    world.consume(most=2)
    wrote, may_commit = threading.Event(), threading.Event()

    def late(events: Sequence[Event], connection: Connection) -> None:
        world.write(events, connection)
        wrote.set()
        assert may_commit.wait(PATIENCE)

    with in_thread(lambda: world.consume(late, most=1, partition=0)):
        assert wrote.wait(PATIENCE)
        with in_thread(lambda: world.views.rebuild(Counts())):
            until_blocked()
            may_commit.set()
    world.check()
    world.consume()
    world.check()


def test_a_handler_that_comes_during_the_switch_writes_to_the_new_table(
    world: World, until_blocked: UntilBlocked
) -> None:
    class Slow(Counts):
        """Stands still in the switch, which applies the event of minute 77."""

        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            super().apply(events, view, connection)
            if any(at == 77 for _, at in read(events)):
                switching.set()
                assert may_switch.wait(PATIENCE)

    far = int(timedelta(days=90) / MINUTE)
    switching, may_switch, told = threading.Event(), threading.Event(), threading.Event()
    world.publish(*range(8))
    world.consume()

    def between(_applied: int) -> None:
        # After the last batch, and before the switch.
        if not told.is_set():
            told.set()
            world.publish(77)
            world.consume()

    # The partition of this time is in the live table, and only there.
    with world.platform.database.transaction() as connection:
        world.views.rollup(Counts.view).add(
            connection,
            [RollupEntry(NOON + far * MINUTE, {"resource": "z"}, {"minutes": 1}, {"digits": "1"} if SKETCHES else {})],
        )
    with in_thread(lambda: world.views.rebuild(Slow(), on_progress=between)):
        assert switching.wait(PATIENCE)
        world.publish(far, 78, 79)
        # Only the far event is in this partition: if its handler fails, an attempt is counted.
        with in_thread(lambda: world.consume(partition=1)):
            until_blocked()
            may_switch.set()
    assert world.consume() == 2
    world.check()
    with world.platform.database.connection() as connection:
        found = connection.execute("SELECT eql_attempts FROM eventsql.consumer").fetchall()
    assert found == [(0,), (0,)]


def test_a_view_that_is_always_in_use_stays_as_it_is(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(*range(4))
    world.consume()
    monkeypatch.setattr(rebuilding_module, "LOCK_SECONDS", 0.01)
    sessions().execute("SELECT FROM eventsql.view_counts")
    with pytest.raises(DatabaseBusyError):
        world.views.rebuild(Counts(), tries=2)
    world.check()


def test_a_switch_is_tried_again_after_a_transaction_that_uses_the_view(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, tries, reading = Rebuilding._switch, list[int | None](), sessions()

    def tried(self: Rebuilding, *given: Any) -> int | None:
        tries.append(switch(self, *given))
        reading.rollback()
        return tries[-1]

    world.publish(*range(4))
    world.consume()
    monkeypatch.setattr(rebuilding_module, "LOCK_SECONDS", 0.01)
    monkeypatch.setattr(Rebuilding, "_switch", tried)
    reading.execute("SELECT FROM eventsql.view_counts")
    assert world.views.rebuild(Counts(), tries=2) == 4
    assert tries == [None, 0]
    world.check()


def test_an_interrupted_rebuild_leaves_nothing_and_a_killed_one_is_begun_anew(world: World) -> None:
    class Dies(Counts):
        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            super().apply(events, view, connection)
            raise KeyboardInterrupt

    world.publish(*range(10))
    world.consume()
    with pytest.raises(KeyboardInterrupt):
        world.views.rebuild(Dies())
    world.check()

    # A killed one ends here.
    world.views._rebuilding(Counts(), 10)._begin(partial=False)
    assert world.leftovers()
    world.views.rebuild(Counts())
    world.check()
    world.views._rebuilding(Counts(), 10)._begin(partial=False)
    world.views.drop("counts")
    assert world.leftovers() == []


def test_a_rebuild_that_was_switched_ends_well_though_its_leftovers_cannot_be_looked_for(world: World) -> None:
    def closed(_events: int) -> None:
        if not world.leftovers():
            # The switch is committed.
            world.platform.close()

    world.publish(*range(10))
    world.consume()
    world.spoil()
    assert world.views.rebuild(Counts(), on_progress=closed) == 10
    world.platform.open()
    assert world.views.compare(Counts()).equal


def test_the_error_of_a_rebuild_is_raised_though_its_table_cannot_be_dropped(world: World) -> None:
    def fails(_filling: ViewFilling) -> None:
        world.platform.close()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.views.rebuild(Counts(), fill=fails)
    world.platform.open()
    assert world.leftovers()
    world.views.rebuild(Counts())
    world.check()


def test_the_later_of_two_rebuilds_goes_on(world: World) -> None:
    world.publish(*range(10))
    world.consume()

    def nested(_filling: ViewFilling) -> None:
        world.views.rebuild(Counts())
        world.publish(11)
        world.consume()

    with pytest.raises(ViewConflictError):
        world.views.rebuild(Counts(), fill=nested)
    world.check()

    begun: list[Shadow] = []
    with pytest.raises(ViewConflictError):
        world.views.rebuild(
            Counts(), fill=lambda _: begun.append(world.views._rebuilding(Counts(), 10)._begin(partial=False))
        )
    assert begun[0].definition.table in world.leftovers()
    world.views.give_up("counts")

    class Overtaken(Counts):
        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            if not done:
                done.append(1)
                world.views.rebuild(Counts())
            super().apply(events, view, connection)

    done: list[int] = []
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Overtaken())
    world.check()


def test_a_rebuild_whose_table_is_dropped_at_its_beginning_finds_nothing_that_the_switch_would_lose(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Rebuilding._begin

    def dropped(self: Rebuilding, *, partial: bool) -> Shadow:
        shadow = begin(self, partial=partial)
        # As the beginning of another rebuild does.
        world.views.give_up("steps")
        return shadow

    with monkeypatch.context() as patch, pytest.raises(ViewConflictError) as raised:
        patch.setattr(Rebuilding, "_begin", dropped)
        world.views.rebuild(Steps())
    assert isinstance(raised.value.__cause__, psycopg.errors.UndefinedTable)


def test_a_rebuild_whose_table_is_dropped_before_the_switch_switches_nothing(world: World) -> None:
    world.publish(*range(10))
    world.consume()
    with pytest.raises(ViewConflictError):
        # As the beginning of another rebuild does.
        world.views.rebuild(Counts(), on_progress=lambda _: world.views.give_up("counts"))
    world.check()


def test_a_rebuild_needs_one_connection(world: World, dsn: str) -> None:
    def consume(_applied: int) -> None:
        if not told:
            told.append(1)
            world.publish(11)
            world.consume()

    told: list[int] = []
    world.publish(*range(10))
    world.consume()
    world.spoil()
    with Database(dsn, pool_size=1, max_overflow=0) as database:
        assert Views(database).rebuild(Counts(), on_progress=consume) == 11
    assert world.views.compare(Counts()).equal


def test_a_rebuild_waits_for_no_other_table(world: World, session: Connection, sessions: Sessions) -> None:
    session.execute("CREATE TABLE public.item (pieces int CHECK (pieces > 0))")
    sessions().execute("DROP TABLE public.item")
    with in_thread(lambda: world.views.rebuild(Steps())):
        pass


def test_a_consumer_that_moves_or_changes_meanwhile_stops_the_rebuild(world: World) -> None:
    world.publish(*range(10))
    world.consume()
    registry = world.platform.registry

    def refused(change: Callable[[], object]) -> None:
        before = [each[:3] for each in world.rows("counts")]

        def once(_applied: int) -> None:
            if not changed:
                changed.append(1)
                change()

        changed: list[int] = []
        with pytest.raises(ViewConflictError):
            world.views.rebuild(Counts(), on_progress=once)
        assert changed
        assert [each[:3] for each in world.rows("counts")] == before
        assert world.leftovers() == []

    refused(lambda: world.platform.seeker.execute(TOPIC, CONSUMER, AtOffset(2)))
    world.spoil()
    filtered = EventFilter(keys=frozenset({"a"}))
    refused(lambda: registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True), filter=filtered))

    def register_for_the_whole_topic() -> None:
        registry.unregister_consumer(TOPIC, CONSUMER)
        registry.register_consumer(Consumer(TOPIC, CONSUMER), start="latest", filter=filtered)

    refused(register_for_the_whole_topic)
    wider = replace(Counts.view, values=("minutes", "more"))
    refused(lambda: world.views.declare(wider))


def test_a_declaration_that_comes_during_the_switch_changes_the_new_table(
    world: World, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = replace(Counts.view, values=("minutes", "more"))
    held, looks, declaring = Rebuilding._held, [], ExitStack()

    def declared(self: Rebuilding, connection: Connection) -> Definition:
        definition = held(self, connection)
        looks.append(definition)
        # The first look is at the beginning, and the second one is in the switch.
        if len(looks) == 2:
            declaring.enter_context(in_thread(lambda: world.views.declare(wider)))
            until_blocked()
        return definition

    world.publish(*range(10))
    world.consume()
    world.spoil()
    monkeypatch.setattr(Rebuilding, "_held", declared)
    with declaring:
        assert world.views.rebuild(Counts()) == 10
    assert world.views.definition("counts") == wider
    assert {each.values["more"].sum for each in world.views.rollup(wider).read()} == {0}


def test_a_topic_that_is_repartitioned_and_back_stops_the_rebuild(world: World, database: Database) -> None:
    """The consumer has the same partitions in the end, and has consumed events of others in between."""
    world.publish(*range(10))
    world.consume()

    def away_and_back(_applied: int) -> None:
        if changed:
            return
        changed.append(1)
        for partitions, first in ((3, 20), (2, 30)):
            world.platform.repartitioner.repartition(TOPIC, partitions)
            world.publish(*range(first, first + 9))
            for each in [*range(partitions)] * 2:
                world.platform.consumers.consume_once(TOPIC, CONSUMER, world.write, partition=each)

    changed: list[int] = []
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Counts(), on_progress=away_and_back)
    with database.connection() as connection:
        found = connection.execute("SELECT eql_partition, eql_until FROM eventsql.consumer ORDER BY 1").fetchall()
    assert found == [(0, None), (1, None)]
    world.check()
    world.views.rebuild(Counts())
    world.check()


def test_a_view_whose_consumer_is_in_the_middle_of_a_repartitioning_is_not_rebuilt(world: World) -> None:
    world.publish(*range(10))
    world.platform.repartitioner.repartition(TOPIC, 3)
    world.consume(most=1)
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Counts())
    for each in [*range(3)] * 2:
        world.consume(partition=each)
    assert world.views.rebuild(Counts()) == 10
    world.check()


@pytest.mark.parametrize(
    ("how", "groups"),
    [
        pytest.param("", [[0, 2, 4, 6], [1, 3, 5, 7]], id="partition by partition"),
        pytest.param("repartitioned", [[each] for each in range(8)], id="in the order of the log"),
        pytest.param("whole", [[*range(8)]], id="the whole topic"),
    ],
)
def test_a_rebuild_hands_out_whole_batches_unless_keys_have_moved(
    world: World, database: Database, how: str, groups: list[list[int]]
) -> None:
    if how == "repartitioned":
        for partitions in (3, 2):
            world.platform.repartitioner.repartition(TOPIC, partitions)
            world.consume()
    elif how == "whole":
        world.platform.registry.unregister_consumer(TOPIC, CONSUMER)
        world.platform.registry.register_consumer(Consumer(TOPIC, CONSUMER))
    else:
        with database.connection() as connection:
            # As if a shard had been added: no key has moved to another partition.
            connection.execute("UPDATE eventsql.topic SET eql_layout = eql_layout + 1")
    for at in range(8):
        world.platform.publisher.publish(Publication(TOPIC, json.dumps(at).encode(), key="a", partition=at % 2))
        world.platform.transfer.run_once()
    if how == "whole":
        world.platform.consumers.consume_once(TOPIC, CONSUMER, world.write)
    else:
        world.consume()
    handed: list[list[int]] = []

    class Watched(Counts):
        def apply(self, events: Sequence[Event], view: RollupView, connection: Connection) -> None:
            handed.append([json.loads(event.value or b"") for event in events])
            super().apply(events, view, connection)

    world.views.rebuild(Watched())
    assert handed == groups


def test_events_that_the_consumer_is_not_handed_or_got_once_more_are_left_out(world: World) -> None:
    world.publish(*range(8))
    filtered = EventFilter(keys=frozenset({"a", "b"}))
    world.platform.registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True), filter=filtered)
    world.consume()
    for consumer, value in ((CONSUMER, b"4"), ("another", b"8")):
        again = Publication(TOPIC, value, key="a", metadata={"redriven_consumer": consumer})
        world.platform.publisher.publish(again)
    world.platform.transfer.run_once()
    world.consume(lambda _events, _connection: None)
    assert world.views.rebuild(Steps()) == 5
    assert world.rows("steps") == [("a", 0), ("a", 4), ("a", 8), ("b", 1), ("b", 5)]


def test_a_rebuild_that_would_lose_something_is_refused(world: World, database: Database) -> None:
    world.publish(1)
    world.consume()

    class Other(Counts):
        view = Rollup("counts", 5 * MINUTE, ("resource",), ("minutes",))

    with pytest.raises(ViewConflictError):
        world.views.rebuild(Other())
    with database.connection() as connection:
        connection.execute("CREATE VIEW public.shown AS SELECT eql_count FROM eventsql.view_counts")
        with pytest.raises(ViewConflictError):
            world.views.rebuild(Counts())
        connection.execute("DROP VIEW public.shown")
        connection.execute("ALTER TABLE eventsql.view_counts ENABLE ROW LEVEL SECURITY")
        with pytest.raises(ViewConflictError):
            world.views.rebuild(Counts())
        connection.execute("ALTER TABLE eventsql.view_counts DISABLE ROW LEVEL SECURITY")
        connection.execute("CREATE INDEX of_resources ON eventsql.view_counts (resource)")
        with pytest.raises(ViewConflictError) as refused:
            world.views.rebuild(Counts(), fill=lambda _filling: pytest.fail("refused only after the fill"))
        assert "of_resources" in str(refused.value)
        assert world.views.compare(Counts()).equal
        connection.execute("DROP INDEX eventsql.of_resources")
    world.platform.registry.set_retention(TOPIC, Retention(seconds=3600))
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Counts())
    assert world.views.rebuild(Counts(), partial=True) == 1
    assert world.leftovers() == []


def test_an_index_that_is_made_during_a_rebuild_is_not_lost(world: World, database: Database) -> None:
    def make(_applied: int) -> None:
        with database.connection() as connection:
            connection.execute("CREATE INDEX IF NOT EXISTS of_resources ON eventsql.view_counts (resource)")

    world.publish(*range(10))
    world.consume()
    with pytest.raises(ViewConflictError, match="of_resources"):
        world.views.rebuild(Counts(), on_progress=make)
    world.check()


def test_a_view_that_is_consumed_as_a_queue_is_not_rebuilt_while_events_behind_its_offset_are_handled(
    world: World, until: Until
) -> None:
    failing = threading.Event()
    failing.set()

    def handle(event: Event, connection: Connection) -> None:
        if event.value == b"0" and failing.is_set():
            raise ValueError("not yet")
        world.write([event], connection)

    world.publish(*range(8))
    with world.platform.consumers.start_queue(TOPIC, CONSUMER, handle, polling_delay=0.02):
        until(lambda: len(world.rows("lines")) == 6)
        for rebuild in (world.views.rebuild, world.views.compare):
            with pytest.raises(ViewConflictError):
                rebuild(Lines())
        failing.clear()
        until(lambda: len(world.rows("lines")) == 8)
    until(lambda: not any(lag.events for lag in world.platform.lag(TOPIC)))
    assert world.views.rebuild(Lines()) == 8
    assert len(world.rows("lines")) == 8


def test_a_view_whose_consumer_was_moved_behind_events_that_a_queue_left_is_rebuilt(world: World, until: Until) -> None:
    def handle(event: Event, connection: Connection) -> None:
        if event.value == b"0":
            raise ValueError("not yet")
        world.write([event], connection)

    world.publish(*range(8))
    with world.platform.consumers.start_queue(TOPIC, CONSUMER, handle, polling_delay=0.02):
        until(lambda: len(world.rows("lines")) == 6)
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Lines())
    world.platform.seeker.execute(TOPIC, CONSUMER, AtOffset(9), force=True)
    assert world.views.rebuild(Lines()) == 8
    assert len(world.rows("lines")) == 8


def test_a_topic_that_retention_has_shortened_is_refused_also_if_the_retention_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(1, 2)
    world.consume()
    monkeypatch.setattr(segments, "floor", lambda *_: 2)
    with pytest.raises(ViewConflictError):
        world.views.rebuild(Counts())
    assert world.views.rebuild(Counts(), partial=True) == 2


def test_the_switch_applies_only_what_was_consumed_since_a_short_round(world: World) -> None:
    """Handlers wait for the switch, so what was consumed during a long round is applied before it."""
    told: list[int] = []

    def consuming(applied: int) -> None:
        told.append(applied)
        if len(told) == 1:
            world.publish(*range(20, 30))
            world.consume(partition=1)
            reads.clear()

    reads: list[int] = []

    class Watched(Counts):
        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            reads.append(len(events))
            super().apply(events, view, connection)

    world.publish(*range(12))
    world.consume()
    world.views.rebuild(Watched(), batch=4, on_progress=consuming)
    assert reads
    # The last call tells of the switch, which found no events.
    assert told[-1] == told[-2]
    world.check()


def test_a_rebuild_switches_beside_a_consumer_that_is_as_fast(world: World) -> None:
    told: list[int] = []

    def consuming(applied: int) -> None:
        told.append(applied)
        # A rebuild that waited for a shorter round would go on for as long.
        if len(told) < 30:
            world.publish(*range(4), keys="a")
            world.consume()

    world.publish(*range(12), keys="a")
    world.consume()
    # Two rounds of 12 events, and the events that were consumed in the second one.
    assert world.views.rebuild(Counts(), batch=4, on_progress=consuming) == 36
    assert told == [4, 8, 12, 16, 20, 24, 36]
    world.check()


@pytest.mark.parametrize("step", ["_catch_up", "_apply_rest"])
def test_a_comparison_has_the_events_of_its_snapshot(world: World, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real = getattr(Rebuilding, step)

    def then_consumed(*given: Any) -> Any:
        result = real(*given)
        world.publish(11)
        world.consume()
        return result

    world.publish(*range(10))
    world.consume()
    monkeypatch.setattr(Rebuilding, step, then_consumed)
    assert world.views.compare(Counts()).equal


def test_a_partition_that_is_far_behind_has_no_others_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(*range(40))
    world.consume(partition=1)
    read_before, read_events = LogReader.read_batch, list[int]()

    def counted(*args: Any, **options: Any) -> tuple[list[Event], bool]:
        events, more = read_before(*args, **options)
        read_events.append(len(events))
        return events, more

    monkeypatch.setattr(LogReader, "read_batch", counted)
    world.views.rebuild(Counts())
    # Once before the switch, and nothing in it.
    assert 0 < sum(read_events) <= 40
    world.check()


def test_a_comparison_holds_both_tables(
    world: World, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild that begins during a comparison waits for it: it would drop the one table, and replace the other."""
    world.publish(*range(6))
    world.consume()
    comparing, may_compare = threading.Event(), threading.Event()
    statement = comparison

    def slow(*args: Any) -> bytes:
        comparing.set()
        assert may_compare.wait(PATIENCE)
        return statement(*args)

    monkeypatch.setattr(rebuilding_module, "comparison", slow)
    compared: list[ViewComparison] = []
    with in_thread(lambda: compared.append(world.views.compare(Counts()))):
        assert comparing.wait(PATIENCE)
        with in_thread(lambda: world.views.rebuild(Counts())):
            try:
                until_blocked()
            finally:
                may_compare.set()
    assert compared == [ViewComparison("counts", 0, 0)]
    world.check()


def test_rights_stay_and_ids_are_new(world: World, database: Database) -> None:
    world.publish(*range(6))
    world.consume()
    with database.connection() as connection:
        connection.execute("GRANT SELECT ON eventsql.view_steps TO PUBLIC")
        connection.execute("GRANT USAGE ON eventsql.view_steps_eql_id_seq TO PUBLIC")
        connection.execute("GRANT UPDATE (eql_data) ON eventsql.view_steps TO PUBLIC")
        connection.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA eventsql GRANT DELETE ON TABLES TO PUBLIC")
        connection.execute("COMMENT ON TABLE eventsql.view_steps IS 'way''s steps'")
        connection.execute("COMMENT ON COLUMN eventsql.view_steps.eql_data IS 'minutes'")

    def wasteful(_filling: ViewFilling) -> None:
        # Transactions that were rolled back have drawn ids.
        with database.connection() as connection:
            connection.execute("SELECT nextval('eventsql.view_steps_eql_id_seq') FROM generate_series(1, 1000)")
        world.publish(8, 12)
        world.consume()
        seen.append(max(each.id for each in world.views.timeline(Steps.view).read("a")))

    seen: list[int] = []
    world.views.rebuild(Steps(), fill=wasteful)
    assert min(each.id for each in world.views.timeline(Steps.view).read("a")) > seen[0]
    world.views.rebuild(Steps())
    before = max(each.id for each in world.views.timeline(Steps.view).read("a"))
    follower = world.views.logs(Lines.view).follow()
    for feed in (Steps(), Lines()):
        world.views.rebuild(feed)
        world.views.rebuild(feed)
    assert min(each.id for each in world.views.timeline(Steps.view).read("a")) > before
    with pytest.raises(ViewConflictError):
        follower.poll()
    with database.connection() as connection:
        found = connection.execute(
            "SELECT relname, relacl::text ~ '(^|[{,])=' FROM pg_class "
            "WHERE relname IN ('view_steps', 'view_steps_eql_id_seq') ORDER BY 1"
        ).fetchall()
        kept = connection.execute(
            "SELECT a.attacl::text ~ '=w/', c.relacl::text ~ '(^|[{,])=r/', obj_description(c.oid), "
            "col_description(c.oid, a.attnum) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid "
            "WHERE c.relname = 'view_steps' AND a.attname = 'eql_data'"
        ).fetchall()
    assert found == [("view_steps", True), ("view_steps_eql_id_seq", True)]
    assert kept == [(True, True, "way's steps", "minutes")]


def test_a_fill_may_leave_the_ids_to_the_table(world: World, database: Database) -> None:
    world.publish(0, 4)
    world.consume()
    before = max(each.id for each in world.views.timeline(Steps.view).read("a"))

    def fill(filling: ViewFilling) -> None:
        steps = world.views.opened(filling.definition)
        with database.transaction() as connection:
            Steps().apply(list(world.platform.reader.read(TOPIC)), steps, connection)

    world.views.rebuild(Steps(), fill=fill)
    assert min(each.id for each in world.views.timeline(Steps.view).read("a")) > before
    world.check()


def test_ids_go_on_behind_the_ids_of_a_fill(world: World, database: Database) -> None:
    def fill(filling: ViewFilling) -> None:
        steps = world.views.opened(filling.definition)
        change = sql.SQL("UPDATE eventsql.{} SET eql_id = %s").format(sql.Identifier(filling.definition.table))
        written.append(filling.after_id + 1_000)
        with database.transaction() as connection:
            Steps().apply(list(world.platform.reader.read(TOPIC)), steps, connection)
            connection.execute(change, written)

    written: list[int] = []
    world.publish(0)
    world.consume()
    world.views.rebuild(Steps(), fill=fill)
    world.publish(4)
    world.consume()
    assert [each.id for each in world.views.timeline(Steps.view).read("a")] == [written[0], written[0] + 1]


def test_a_rebuild_that_ends_during_a_poll_gives_a_follower_no_line_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = world.views.logs(Lines.view).follow()
    world.publish(*range(8))
    world.consume()
    assert len(follower.poll()) == 8

    def rebuilt(*given: Any) -> set[str]:
        monkeypatch.undo()
        world.views.rebuild(Lines())
        return follower._table.writers(*given)

    monkeypatch.setattr(follower._table, "writers", rebuilt)
    assert follower.poll() == []
    with pytest.raises(ViewConflictError):
        follower.poll()


def test_entries_in_another_order_are_another_timeline(world: World, database: Database) -> None:
    world.publish(*range(8))
    world.consume()
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.view_steps SET eql_id = -eql_id WHERE eql_resource = 'a'")
    compared = world.views.compare(Steps())
    assert (compared.missing, compared.surplus) == (2, 2)


def test_entries_beyond_the_retention_are_not_compared(world: World) -> None:
    definition: Definition = replace(Lines.view, retention=10 * 365 * DAY)
    world.views.declare(definition)

    class Old(Lines):
        view = definition  # type: ignore[assignment]  # another retention

    world.publish(3)
    world.consume()
    with world.platform.database.connection() as connection:
        connection.execute("SELECT eventsql.make_view_periods('lines', ARRAY['2001-01-01 00:00+00'::timestamptz])")
        connection.execute(
            "INSERT INTO eventsql.view_lines (eql_tenant, eql_resource, eql_level, eql_line, eql_attributes, "
            "eql_written_at) VALUES ('', 'a', 'info', 'old', '{}', '2001-01-01 08:00+00')"
        )
    assert world.views.compare(Old()).equal
    world.views.rebuild(Old())
    assert world.rows("lines") == ["line 3"]
