"""A batch that is too much for the server is halved, down to one event; triggers force the refusals of the server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.commit_retry import CommitRetryLimits
from eventsql_orchestration.database import driver_connection
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, DatabaseFullError, StuckEventError
from eventsql_orchestration.maintenance import repartitioning
from eventsql_orchestration.publishing import batch_sizes
from eventsql_orchestration.publishing.log_room import LogRoom
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.storage.appending import BufferedBatch, LogAppender
from eventsql_orchestration.storage.reading import LogReader
from tests.forms import in_blocks, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eventsql_orchestration.database import Connection
    from tests.fixtures import Until

CANCELED: Final = "57014"
TEMPORARY_FILES: Final = "53400"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("payments"))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def session(session: Connection) -> psycopg.Connection[Any]:
    session.execute("CREATE TABLE statements (id bigserial, rows bigint)")
    return session


@pytest.fixture
def refuse(session: Connection) -> Callable[..., None]:
    """Has the server refuse each statement that inserts too many rows, or a certain one; notes the sizes of others."""

    def refusing(most: int, *, table: str = stored("orders"), value: str = "", state: str = CANCELED) -> None:
        events, own = "count(*)", f"eql_value = '{value}'"
        if table.endswith("_block"):
            events, own = "coalesce(sum(eql_events), 0)", f"'{value}' = ANY (eql_values)"
        session.execute(
            f"""
            CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF (SELECT {events} > {most} OR bool_or({own}) FROM added) THEN
                    RAISE EXCEPTION 'too much' USING ERRCODE = '{state}';
                END IF;
                INSERT INTO public.statements (rows) SELECT {events} FROM added HAVING count(*) > 0;
                RETURN NULL;
            END
            $$;
            CREATE OR REPLACE TRIGGER refuse AFTER INSERT ON eventsql.{table}
                REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION refuse();
            """
        )

    return refusing


def publish(platform: EventSQL, *values: int, topic: str = "orders") -> None:
    """Through the buffer."""
    for value in values:
        platform.publisher.publish(Publication(topic, b"%d" % value))


def store(platform: EventSQL) -> None:
    """Have twenty events in the log for a consumer."""
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    publish(platform, *range(20))
    platform.transfer.run_once()


def numbers(events: Sequence[Event]) -> list[int]:
    return [int(event.value) for event in events]


def read(platform: EventSQL, topic: str = "orders") -> list[int]:
    return numbers(platform.reader.read(topic))


def sizes(session: Connection) -> list[int]:
    return [rows for (rows,) in session.execute("SELECT rows FROM statements ORDER BY id")]


# The transfer


@pytest.mark.parametrize(
    ("state", "most"),
    [
        (CANCELED, 1), (CANCELED, 3), (CANCELED, 19), (TEMPORARY_FILES, 3), ("53100", 3), ("53200", 3), ("54000", 3),
        ("P0001", 3),
    ],
)  # fmt: skip
def test_a_batch_that_the_server_refuses_is_moved_in_smaller_ones(
    platform: EventSQL, refuse: Callable[..., None], state: str, most: int
) -> None:
    publish(platform, *range(20))
    refuse(most, state=state)
    assert platform.transfer.run_once() == {"orders": 20}
    assert read(platform) == list(range(20))


def test_a_fixed_batch_is_halved_as_well(platform: EventSQL, refuse: Callable[..., None]) -> None:
    publish(platform, *range(20))
    refuse(3)
    transfer = Transfer(platform.database, batch=10)
    assert transfer.run_once() == {"orders": 20}
    transfer.close()


def test_batches_grow_again_when_the_server_takes_them(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sizes, "BATCH_SECONDS", 1e9)
    publish(platform, *range(8))
    refuse(1)
    platform.transfer.run_once()
    assert sizes(session) == [1] * 8
    refuse(1_000)
    publish(platform, *range(31))
    platform.transfer.run_once()
    grown = sizes(session)[8:]
    assert sum(grown) == 31
    assert grown[:4] in ([1, 2, 4, 8], [2, 4, 8, 16])


def test_large_events_behind_small_ones_are_moved_in_smaller_batches(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sizes, "MOST_BYTES", 100_000)
    # The server compresses them.
    values = [b"small"] * 5 + [b"%d" % each * 40_000 for each in range(7)] + [b"small"] * 5
    for value in values:
        platform.publisher.publish(Publication("orders", value))
    refuse(1_000)
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == values
    moved = iter(values)
    batches = [[len(next(moved)) for _ in range(size)] for size in sizes(session)]
    assert all(sum(batch) <= 100_000 or len(batch) == 1 for batch in batches)


def test_a_slow_server_does_not_make_a_batch_larger_that_was_made_small(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sizes, "BATCH_SECONDS", -1.0)
    publish(platform, *range(20))
    refuse(5)
    platform.transfer.run_once()
    assert sizes(session) == [5, 5, 5, 5]


def test_an_event_that_cannot_be_moved_alone_is_named_and_those_before_it_are_moved(
    platform: EventSQL, refuse: Callable[..., None], session: Connection
) -> None:
    publish(platform, *range(10))
    platform.publisher.publish(Publication("orders", b"7" * 1_000, key="key", metadata={"a": "b"}))
    publish(platform, 11, 12)
    publish(platform, *range(5), topic="payments")
    row = session.execute("SELECT eql_id FROM eventsql.event_buffer WHERE eql_key = 'key'").fetchone()
    refuse(1_000, value="7" * 1_000)
    with pytest.raises(StuckEventError) as caught:
        platform.transfer.run_once()
    assert (caught.value.topic, (caught.value.buffer_id,)) == ("orders", row)
    assert caught.value.size == 1_000 + len("key") + len('{"a":"b"}')
    assert isinstance(caught.value.__cause__, psycopg.errors.QueryCanceled)
    assert read(platform) == list(range(10))
    assert read(platform, "payments") == list(range(5))
    with pytest.raises(StuckEventError):
        platform.transfer.run_once()
    refuse(1_000)
    assert platform.transfer.run_once() == {"orders": 3}


def test_an_event_that_finds_the_disk_full_is_not_one_to_take_out_of_the_buffer(
    platform: EventSQL, refuse: Callable[..., None]
) -> None:
    publish(platform, 1, 2)
    refuse(0, state="53100")
    with pytest.raises(DatabaseFullError):
        platform.transfer.run_once()
    refuse(2)
    assert platform.transfer.run_once() == {"orders": 2}


def test_the_batches_of_other_topics_stay_as_they_are(platform: EventSQL, refuse: Callable[..., None]) -> None:
    publish(platform, *range(20))
    publish(platform, *range(20), topic="payments")
    refuse(2)
    moved: list[dict[str, int]] = []
    stop = threading.Event()

    def note(counts: dict[str, int]) -> None:
        moved.append(counts)
        if sum(each.get("orders", 0) for each in moved) == 20:
            stop.set()

    transfer = Transfer(platform.database)
    transfer.run(stop, on_moved=note)
    transfer.close()
    assert moved[0] == {"payments": 20}
    assert read(platform) == list(range(20))


def test_an_error_that_has_nothing_to_do_with_events_leaves_batches_as_they_are(
    platform: EventSQL, session: Connection, refuse: Callable[..., None]
) -> None:
    publish(platform, *range(20))
    refuse(0, state="42501")
    with pytest.raises(DatabaseError) as caught:
        platform.transfer.run_once()
    assert not isinstance(caught.value, StuckEventError)
    assert isinstance(caught.value.__cause__, psycopg.errors.InsufficientPrivilege)
    refuse(1_000)
    platform.transfer.run_once()
    assert sizes(session) == [20]


def test_a_batch_whose_end_takes_too_long_to_find_is_a_smaller_one(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = LogAppender.batch

    def find_few(*of: Any, limit: int, **options: Any) -> BufferedBatch:
        if limit > 5:
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return find(*of, limit=limit, **options)

    publish(platform, *range(20))
    monkeypatch.setattr(LogAppender, "batch", find_few)
    assert platform.transfer.run_once() == {"orders": 20}
    assert read(platform) == list(range(20))


def test_a_batch_keeps_its_size_if_the_server_cannot_make_room_in_the_log(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    refuse(1_000)
    publish(platform, *range(20))
    with monkeypatch.context() as patched, pytest.raises(DatabaseError):
        patched.setattr(LogRoom, "make", fail)
        platform.transfer.run_once()
    platform.transfer.run_once()
    assert sizes(session) == [20]


def test_a_publisher_whose_role_was_refused_a_log_leaves_it_to_the_transfer(
    platform: EventSQL, refuse: Callable[..., None]
) -> None:
    batch = [Publication("orders", b"%d" % number) for number in range(100)]
    refuse(0, state="42501")
    platform.publisher.publish_all(batch)
    refuse(1_000)
    platform.publisher.publish_all(batch)
    assert read(platform) == []
    assert platform.transfer.run_once() == {"orders": 200}


def end_sessions(session: Connection) -> None:
    """Have the server end each session that inserts more than three events at once, as if it ran out of memory."""
    session.execute(
        """
        CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT {events} > 3 FROM added) THEN
                PERFORM pg_terminate_backend(pg_backend_pid());
                PERFORM pg_sleep(60);
            END IF;
            RETURN NULL;
        END
        $$;
        CREATE TRIGGER die AFTER INSERT ON eventsql.{log}
            REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION die();
        """.replace("{log}", stored("orders")).replace("{events}", "sum(eql_events)" if in_blocks() else "count(*)")
    )


def test_a_lost_connection_makes_the_next_batch_smaller(platform: EventSQL, session: Connection) -> None:
    publish(platform, *range(20))
    end_sessions(session)
    failures = 0
    while platform.buffered():
        try:
            platform.transfer.run_once()
        except DatabaseError:
            failures += 1
            assert failures < 20
    assert failures
    assert read(platform) == list(range(20))


# Publishers


@pytest.mark.parametrize("lost", [False, True])
def test_a_publisher_leaves_a_buffer_that_it_cannot_move_to_the_transfer(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], *, lost: bool
) -> None:
    publish(platform, *range(10))
    refuse(1_000, value="3")
    if lost:
        end_sessions(session)
    batch = [Publication("orders", b"%d" % number) for number in range(100, 200)]
    assert platform.publisher.publish_all(batch) == 100
    assert platform.buffered() == {"orders": 110}
    refuse(1_000)
    session.execute("DROP FUNCTION IF EXISTS die CASCADE")
    platform.transfer.run_once()
    assert read(platform) == [*range(10), *range(100, 200)]


@pytest.mark.usefixtures("single_rows")
def test_a_batch_that_is_cancelled_in_the_log_goes_to_the_buffer(
    platform: EventSQL, refuse: Callable[..., None]
) -> None:
    refuse(50)
    assert platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(100)) == 100
    assert platform.transfer.run_once() == {"orders": 100}
    assert read(platform) == list(range(100))


# Repartitioning


def test_the_buffer_is_emptied_in_parts_of_some_size(
    platform: EventSQL, session: Connection, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repartitioning, "PART_BYTES", 4)
    publish(platform, *range(9))
    refuse(4)
    with platform.database.core() as connection:
        repartitioning.drain(driver_connection(connection), "eventsql", [("orders", -1)])
    assert read(platform) == list(range(9))
    assert sizes(session) == [3, 4, 2]


# Reading


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of events that are read at once; the server cancels each read of more than three, a negative one."""
    done: list[int] = []

    def limited(
        self: LogReader, connection: Connection, topic: str, *, limit: int, **options: Any
    ) -> tuple[list[Event], bool]:
        events, more = unlimited(self, connection, topic, limit=limit, **options)
        if len(events) > 3:
            done.append(-len(events))
            connection.execute("DO $$ BEGIN RAISE EXCEPTION 'too much' USING ERRCODE = '57014'; END $$")
        done.append(len(events))
        return events, more

    unlimited = LogReader.read_batch
    monkeypatch.setattr(LogReader, "read_batch", limited)
    return done


def test_a_consumer_reads_fewer_events_at_once(platform: EventSQL, reads: list[int]) -> None:
    store(platform)
    seen: list[int] = []
    while platform.consumers.consume_once("orders", "mailer", lambda events, _: seen.extend(numbers(events))):
        pass
    assert seen == list(range(20))


def test_a_claim_is_processed_in_smaller_batches(platform: EventSQL, reads: list[int]) -> None:
    store(platform)
    seen: list[int] = []
    claim = platform.claims.claim("orders", "mailer", -1, owner="me")
    assert isinstance(claim, Claim)
    assert numbers(platform.claims.read(claim)) == list(range(20))
    assert platform.claims.process(claim, lambda events, _: seen.extend(numbers(events))).consumed == 20
    assert seen == list(range(20))


def test_a_leased_consumer_reads_its_range_in_parts(platform: EventSQL, reads: list[int], until: Until) -> None:
    store(platform)
    seen: list[int] = []
    with platform.consumers.start_leased(
        "orders", "mailer", lambda events, _: seen.extend(numbers(events)), polling_delay=0.01
    ):
        until(lambda: len(seen) >= 20)
    assert seen == list(range(20))


def test_a_single_event_that_cannot_be_read_is_an_error(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    store(platform)

    def cancelled(self: LogReader, connection: Connection, *_: Any, **__: Any) -> tuple[list[Event], bool]:
        connection.execute("DO $$ BEGIN RAISE EXCEPTION 'too much' USING ERRCODE = '57014'; END $$")
        return [], False

    monkeypatch.setattr(LogReader, "read_batch", cancelled)
    with pytest.raises(DatabaseBusyError):
        platform.consumers.consume_once("orders", "mailer", lambda _events, _connection: None)


# Redriving


def test_letters_are_redriven_in_smaller_batches(
    platform: EventSQL, session: Connection, refuse: Callable[..., None]
) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    publish(platform, *range(20), topic="orders_dlt")
    platform.transfer.run_once()
    refuse(3, table="event_buffer")
    assert platform.dead_letters.redrive("orders") == 20
    platform.transfer.run_once()
    assert read(platform) == list(range(20))
    assert max(sizes(session)) <= 3


def test_a_single_letter_that_cannot_be_redriven_is_an_error(platform: EventSQL, refuse: Callable[..., None]) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    publish(platform, 0, topic="orders_dlt")
    platform.transfer.run_once()
    refuse(0, table="event_buffer")
    with pytest.raises(DatabaseBusyError):
        platform.dead_letters.redrive("orders")


def test_a_consumer_tries_larger_reads_again_after_some_smaller_ones(platform: EventSQL, reads: list[int]) -> None:
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(batches=2)
    store(platform)
    while platform.consumers.consume_once("orders", "mailer", lambda _events, _connection: None, max_events=8):
        pass
    assert reads == [-8, -4, 2, 2, 2, -4, 2, 2, 2, -4, 2, 2, 2, 2, 0]
