"""Ids are given out one by one and upwards, after every id that is there; otherwise nothing is written to a log."""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.database import Connection, migrations
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, SequenceError
from eventsql_orchestration.model import BLOCKS, ROWS, STORAGES, Storage
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.storage import sequences
from eventsql_orchestration.storage.appending import LogAppender
from tests.forms import stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fixtures import Sessions

LOG = f'"eventsql"."{stored("orders")}_eql_id_seq"'
BUFFER = '"eventsql"."event_buffer_eql_id_seq"'

settings = pytest.mark.parametrize("setting", ["CACHE 50", "INCREMENT BY -1", "CYCLE"])


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("payments"))


pytestmark = pytest.mark.prepared.with_args(prepare)


def publish(platform: EventSQL, *values: int, topic: str = "orders") -> None:
    """Through the buffer."""
    for value in values:
        platform.publisher.publish(Publication(topic, b"%d" % value))


def read(platform: EventSQL) -> list[int]:
    return [int(event.value) for event in platform.reader.read("orders")]


# Settings


@settings
def test_a_log_whose_sequence_is_set_otherwise_gets_no_event_until_that_is_mended(
    platform: EventSQL, session: Connection, setting: str
) -> None:
    session.execute(f"ALTER SEQUENCE {LOG} {setting}")
    publish(platform, 1, 2)
    publish(platform, 1, topic="payments")
    with pytest.raises(SequenceError) as caught:
        platform.transfer.run_once()
    assert caught.value.sequence == LOG
    assert platform.buffered() == {"orders": 2}, "the other topic goes on"
    with pytest.raises(SequenceError) as of_publisher:
        platform.publisher.publish_all(Publication("orders", b"3") for _ in range(100))
    assert of_publisher.value.remedy == caught.value.remedy
    session.execute(caught.value.remedy)
    assert platform.transfer.run_once() == {"orders": 2}
    assert read(platform) == [1, 2]


@settings
def test_a_buffer_whose_sequence_is_set_otherwise_is_not_moved_until_that_is_mended(
    platform: EventSQL, session: Connection, setting: str
) -> None:
    session.execute(f"ALTER SEQUENCE {BUFFER} {setting} START 1")
    publish(platform, 1)
    with pytest.raises(SequenceError) as caught:
        platform.transfer.run_once()
    assert caught.value.sequence == BUFFER
    session.execute(caught.value.remedy)
    assert platform.transfer.run_once() == {"orders": 1}


@pytest.mark.parametrize("sequence", [LOG, BUFFER])
def test_a_setting_that_changes_while_the_sequence_is_used_is_found_by_the_next_batch(
    platform: EventSQL, session: Connection, sequence: str
) -> None:
    batch = [Publication("orders", b"1") for _ in range(100)]
    platform.publisher.publish_all(batch)
    publish(platform, 1)
    platform.transfer.run_once()
    session.execute(f"ALTER SEQUENCE {sequence} CACHE 50")
    publish(platform, 2)
    with pytest.raises(SequenceError):
        platform.transfer.run_once()
    if sequence == LOG:
        with pytest.raises(SequenceError):
            platform.publisher.publish_all(batch)


def test_the_remedy_makes_other_sessions_drop_the_ids_that_they_hold(
    platform: EventSQL, session: Connection, sessions: Sessions
) -> None:
    session.execute(f"ALTER SEQUENCE {LOG} CACHE 50")
    other = sessions()
    other.autocommit = True
    assert other.execute(f"SELECT nextval('{LOG}')").fetchone() == (1,)
    (state,) = sequences.states(session, "eventsql", [stored("orders")])
    error = state.error()
    assert error is not None
    session.execute(error.remedy)
    publish(platform, 1)
    platform.transfer.run_once()
    (event,) = platform.reader.read("orders")
    later = other.execute(f"SELECT nextval('{LOG}')").fetchone()
    assert later is not None
    assert later[0] > event.id


def test_registering_a_topic_again_mends_the_sequence_of_its_log(platform: EventSQL, session: Connection) -> None:
    session.execute(f"ALTER SEQUENCE {LOG} CACHE 50 CYCLE")
    publish(platform, 1)
    platform.registry.register_topic(Topic("orders"))
    assert platform.transfer.run_once() == {"orders": 1}


def test_a_log_that_gets_a_retention_has_its_sequence_mended(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("rows", storage="rows"))
    session.execute(
        """
        INSERT INTO eventsql.topic (eql_name, eql_partitions) VALUES ('plain', -1);
        INSERT INTO eventsql.event_buffer_lock (eql_topic) VALUES ('plain');
        CREATE TABLE eventsql.plain_event (LIKE eventsql.rows_event INCLUDING ALL);
        CREATE SEQUENCE eventsql.theirs CACHE 20 OWNED BY eventsql.plain_event.eql_id;
        ALTER TABLE eventsql.plain_event ALTER COLUMN eql_id SET DEFAULT nextval('eventsql.theirs');
        """
    )
    platform.registry.set_retention("plain", Retention(events=1_000))
    platform.retention.run_once(["plain"])
    publish(platform, 1, topic="plain")
    assert platform.transfer.run_once() == {"plain": 1}


def test_a_migration_mends_every_sequence_that_the_platform_had_then(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE SEQUENCE eventsql.of_somebody CACHE 7")
    names = ["event_buffer", "consumer_claim", "queue_message", "timeline_entry", "log_line"]
    # Logs were in rows then.
    for topic in ("rows", "others"):
        platform.registry.register_topic(Topic(topic, storage="rows"))
        names.append(f"{topic}_event")
    before = sequences.states(session, "eventsql", names)
    assert len(before) == 7
    for state in before:
        session.execute(f"ALTER SEQUENCE {state} CACHE 50")
    revision = importlib.import_module(f"{migrations.__name__}.versions.0010_sequences")
    session.execute(f"SET search_path TO eventsql; {revision._SEQUENCES}")
    assert {state.cache for state in sequences.states(session, "eventsql", names)} == {1}
    assert session.execute(
        "SELECT seqcache FROM pg_sequence WHERE seqrelid = 'eventsql.of_somebody'::regclass"
    ).fetchone() == (7,), "what is not the platform's is left alone"


def test_the_error_survives_pickling() -> None:
    error = SequenceError("wrong", sequence=LOG, remedy="ALTER")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.sequence, copy.remedy) == (error.message, LOG, "ALTER")


# Sequences that were set back


def consume(platform: EventSQL, topic: str = "orders") -> list[int]:
    values: list[int] = []

    def take(events: Sequence[Event], connection: Connection) -> None:
        values.extend(int(event.value) for event in events)

    while platform.consumers.consume_once(topic, "mailer", take):
        pass
    return values


resets = pytest.mark.parametrize("reset", ["SELECT setval('{}', 3)", "ALTER SEQUENCE {} RESTART WITH 1"])


@resets
@pytest.mark.parametrize("straight", [False, True])
def test_a_log_whose_sequence_was_set_back_loses_no_event(
    platform: EventSQL, session: Connection, *, reset: str, straight: bool
) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    publish(platform, *range(10))
    platform.transfer.run_once()
    assert consume(platform) == list(range(10))
    # As after retention: nothing collides, and consumers are past the ids that come next.
    session.execute(f"DELETE FROM eventsql.{stored('orders')}")
    session.execute(reset.format(LOG))
    if straight:
        platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(100, 200))
        assert platform.reader.count("orders") == 100
    else:
        publish(platform, *range(100, 200))
        platform.transfer.run_once()
    assert consume(platform) == list(range(100, 200))


@resets
def test_a_log_whose_sequence_was_set_back_between_two_batches_of_a_publisher_loses_no_event(
    platform: EventSQL, session: Connection, reset: str
) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    for values in (range(100), range(100, 200)):
        platform.publisher.publish_all(Publication("orders", b"%d" % value) for value in values)
        assert (platform.buffered(), consume(platform)) == ({}, list(values))
        session.execute(f"DELETE FROM eventsql.{stored('orders')}")
        session.execute(reset.format(LOG))


def test_a_log_whose_sequence_was_set_back_while_it_is_written_loses_no_event(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    publish(platform, *range(10))
    platform.transfer.run_once()
    session.execute(f"SELECT setval('{LOG}', 3)")
    publish(platform, *range(10, 20))
    platform.transfer.run_once()
    assert consume(platform) == list(range(20))


@pytest.mark.parametrize("back_to", [101, 150], ids=["the last id that the writer saw", "a later id"])
@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_sequence_that_was_set_back_to_an_id_that_another_writer_took_loses_no_event(
    platform: EventSQL, dsn: str, session: Connection, monkeypatch: pytest.MonkeyPatch,
    *, buffered: bool, emptied: bool, back_to: int,
) -> None:  # fmt: skip
    # Ids that the writer has not seen are looked at, however soon they come.
    monkeypatch.setattr(sequences, "TRUST_SECONDS", 0.0 if back_to == 101 else 3_600.0)

    def publish_all(publishing: EventSQL, values: range) -> None:
        publishing.publisher.publish_all(Publication("orders", b"%d" % value) for value in values)

    platform.registry.register_consumer(Consumer("orders", "mailer"))
    publish(platform, 0)
    platform.transfer.run_once()
    publish_all(platform, range(1, 101))
    with EventSQL(dsn, transfer=False) as other:
        publish_all(other, range(101, 201))
    assert consume(platform) == list(range(201))
    if emptied:
        session.execute(f"DELETE FROM eventsql.{stored('orders')}")
    session.execute(f"SELECT setval('{LOG}', {back_to})")
    if buffered:
        publish(platform, *range(201, 261))
    else:
        # Fewer than before: the last one's id must not be that of another block.
        publish_all(platform, range(201, 261))
    platform.transfer.run_once()
    assert consume(platform) == list(range(201, 261))


@pytest.mark.parametrize(
    ("storage", "at", "straight"),
    [
        (BLOCKS, "move", False), (BLOCKS, "move_blocks", False), (ROWS, "move", False),
        (BLOCKS, "move", True), (BLOCKS, "move_blocks", True), (ROWS, "move", True),
        # With an event in the buffer, a publisher draws the ids of its blocks by a statement of its own.
        (BLOCKS, "draw", True), (ROWS, "append", True),
    ],
)  # fmt: skip
def test_a_sequence_that_is_set_back_while_ids_are_drawn_loses_no_event(
    platform: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch,
    *, storage: Storage, at: str, straight: bool,
) -> None:  # fmt: skip
    """The ids are drawn by the transfer or, with `straight`, by a publisher."""
    table = "parcels_block" if storage == BLOCKS else "parcels_event"
    platform.registry.register_topic(Topic("parcels", storage=storage))
    platform.registry.register_consumer(Consumer("parcels", "mailer"))
    platform.publisher.publish_all(Publication("parcels", b"%d" % value) for value in range(100))
    assert consume(platform, "parcels") == list(range(100))
    session.execute(f"DELETE FROM eventsql.{table}")
    waiting = 60 if at == "move_blocks" else 1
    with sessions() as other:
        events = (Publication("parcels", b"%d" % value) for value in range(100, 100 + waiting))
        platform.publisher.publish_all(events, connection=other)
    real = getattr(LogAppender, at)

    def behind(*given: Any, **named: Any) -> Any:
        monkeypatch.undo()
        session.execute(f"SELECT setval('eventsql.{table}_eql_id_seq', 20)")
        return real(*given, **named)

    monkeypatch.setattr(LogAppender, at, behind)
    end = 100 + waiting
    if straight:
        platform.publisher.publish_all(Publication("parcels", b"%d" % value) for value in range(end, end + 60))
        end += 60
    platform.transfer.run_once()
    assert getattr(LogAppender, at) is real
    assert consume(platform, "parcels") == list(range(100, end))


@pytest.mark.parametrize(("at", "straight"), [("move", False), ("move", True), ("append", True)])
@pytest.mark.parametrize("set_back", [True, False])
def test_a_sequence_of_rows_that_is_set_back_and_then_far_forward_in_one_batch_loses_no_event(
    platform: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch,
    *, at: str, straight: bool, set_back: bool,
) -> None:  # fmt: skip
    """Unless it is set back, another program draws the ids, and the batch is kept as it is."""
    sequence = "eventsql.parcels_event_eql_id_seq"
    platform.registry.register_topic(Topic("parcels", storage=ROWS))
    platform.registry.register_consumer(Consumer("parcels", "mailer"))
    platform.publisher.publish_all(Publication("parcels", b"%d" % value) for value in range(100))
    assert consume(platform, "parcels") == list(range(100))
    session.execute("DELETE FROM eventsql.parcels_event")
    with sessions() as other:
        platform.publisher.publish_all([Publication("parcels", b"100")], connection=other)
    move, last_id = getattr(LogAppender, at), LogAppender.last_id
    looks: list[int | None] = []

    def behind(*given: Any, **named: Any) -> Any:
        if set_back and not looks:
            session.execute(f"SELECT setval('{sequence}', 20)")
        return move(*given, **named)

    def forward(appender: LogAppender, connection: Connection, topic: str) -> int | None:
        if not looks:
            session.execute(f"SELECT setval('{sequence}', 10000)")
        looks.append(last_id(appender, connection, topic))
        return looks[-1]

    monkeypatch.setattr(LogAppender, at, behind)
    monkeypatch.setattr(LogAppender, "last_id", forward)
    end = 101
    if straight:
        platform.publisher.publish_all(Publication("parcels", b"%d" % value) for value in range(end, end + 60))
        end += 60
    platform.transfer.run_once()
    assert looks[0] == 10_000
    assert (len(looks) > 1) is set_back
    assert consume(platform, "parcels") == list(range(100, end))


def emptied_log(platform: EventSQL, session: Connection, storage: Storage) -> str:
    """Let topic `parcels` have consumed events that its log no longer holds. Gives the name of the log's sequence."""
    table = "parcels_block" if storage == BLOCKS else "parcels_event"
    platform.registry.register_topic(Topic("parcels", 2, storage=storage))
    platform.registry.register_consumer(Consumer("parcels", "mailer"))
    platform.publisher.publish_all(Publication("parcels", b"%d" % value, key="1") for value in range(100))
    assert consume(platform, "parcels") == list(range(100))
    session.execute(f"DELETE FROM eventsql.{table}")
    return f"eventsql.{table}_eql_id_seq"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_repartitioning_moves_events_behind_a_sequence_that_was_set_back(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    sequence = emptied_log(platform, session, storage)
    session.execute(f"SELECT setval('{sequence}', 20)")
    publish(platform, 100, topic="parcels")
    # The events come after the last look before publishers have to wait.
    monkeypatch.setattr(type(platform.shards[0].transfer), "run_once", lambda *_, **__: {})
    platform.repartitioner.repartition("parcels", 3)
    assert consume(platform, "parcels") == [100]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_repartitioning_is_tried_again_if_the_sequence_is_set_back_while_it_moves_events(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    sequence = emptied_log(platform, session, storage)
    publish(platform, 100, topic="parcels")
    # The events come after the last look before publishers have to wait.
    monkeypatch.setattr(type(platform.shards[0].transfer), "run_once", lambda *_, **__: {})
    real = LogAppender.move

    def behind(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(LogAppender, "move", real)
        session.execute(f"SELECT setval('{sequence}', 20)")
        return real(*given, **named)

    monkeypatch.setattr(LogAppender, "move", behind)
    with pytest.raises(DatabaseBusyError):
        platform.repartitioner.repartition("parcels", 3, timeout=0.0)
    assert LogAppender.move is real
    assert platform.registry.topic("parcels").partitions == 2

    monkeypatch.setattr(LogAppender, "move", behind)
    platform.repartitioner.repartition("parcels", 3)
    assert LogAppender.move is real
    assert consume(platform, "parcels") == [100]


@pytest.mark.parametrize("storage", STORAGES)
def test_ids_go_on_behind_the_layouts_of_a_topic(platform: EventSQL, session: Connection, storage: Storage) -> None:
    table = "parcels_block" if storage == BLOCKS else "parcels_event"
    platform.registry.register_topic(Topic("parcels", 2, storage=storage))
    platform.publisher.publish_all(Publication("parcels", b"%d" % value, key="1") for value in range(100))
    changed = platform.repartitioner.repartition("parcels", 3)
    assert changed is not None
    session.execute(f"DELETE FROM eventsql.{table}; SELECT setval('eventsql.{table}_eql_id_seq', 20)")
    publish(platform, 1, topic="parcels")
    platform.transfer.run_once()
    (event,) = platform.reader.read("parcels")
    assert event.id > changed.after


@pytest.mark.parametrize("storage", STORAGES)
def test_a_repartitioning_begins_behind_the_log_if_its_sequence_was_set_back(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    table = "parcels_block" if storage == BLOCKS else "parcels_event"
    platform.registry.register_topic(Topic("parcels", 3, storage=storage))
    platform.registry.register_consumer(Consumer("parcels", "mailer", partitioned=True))
    publications = [Publication("parcels", b"%d" % value, key=f"{value}") for value in range(160)]
    platform.publisher.publish_all(publications[:100])
    session.execute(f"SELECT setval('eventsql.{table}_eql_id_seq', 20)")
    # No event waits in the buffer. Events of the partition that goes away wait in the log.
    platform.repartitioner.repartition("parcels", 2)
    platform.publisher.publish_all(publications[100:])
    assert sorted(consume(platform, "parcels")) == list(range(160))


def test_a_buffer_whose_sequence_is_behind_its_ids_is_moved_in_order(platform: EventSQL, session: Connection) -> None:
    """As after the restore of a dump without sequences."""
    publish(platform, *range(10))
    session.execute(f"SELECT setval('{BUFFER}', 1, false)")
    assert platform.transfer.run_once() == {"orders": 10}
    publish(platform, *range(10, 20))
    platform.transfer.run_once()
    assert read(platform) == list(range(20))


def test_a_buffer_whose_sequence_is_behind_and_in_use_is_refused_with_the_remedy(
    platform: EventSQL, session: Connection, sessions: Sessions
) -> None:
    publish(platform, *range(10))
    session.execute(f"SELECT setval('{BUFFER}', 100)")
    open_transaction = sessions()
    platform.publisher.publish(Publication("orders", b"11"), connection=open_transaction)
    session.execute(f"SELECT setval('{BUFFER}', 1)")
    with pytest.raises(SequenceError) as caught:
        platform.transfer.run_once()
    assert caught.value.sequence == BUFFER
    open_transaction.commit()
    session.execute(caught.value.remedy)
    platform.transfer.run_once()
    assert sorted(read(platform)) == [*range(10), 11]


def test_events_after_a_restart_of_the_buffers_sequence_are_found_however_many_came(
    platform: EventSQL, session: Connection
) -> None:
    publish(platform, *range(10))
    platform.transfer.run_once()
    session.execute("TRUNCATE eventsql.event_buffer RESTART IDENTITY")
    publish(platform, *range(10, 40))
    assert platform.transfer.run_once() == {"orders": 30}
    assert read(platform) == list(range(40))


# Looking for them


def test_each_fault_of_a_sequence_is_found_and_mended_by_its_remedy(platform: EventSQL, session: Connection) -> None:
    publish(platform, *range(10))
    platform.transfer.run_once()
    with platform.database.connection() as connection:
        assert sequences.faults(connection, "eventsql", ["orders", "payments"]) == []
        session.execute("ALTER SEQUENCE eventsql.queue_message_eql_id_seq CACHE 9")
        session.execute("ALTER SEQUENCE eventsql.log_line_eql_id_seq MAXVALUE 100")
        session.execute("SELECT setval('eventsql.log_line_eql_id_seq', 99)")
        session.execute("SELECT setval('eventsql.event_buffer_eql_id_seq', 9223372036854775806)")
        session.execute(f"SELECT setval('{LOG}', 3)")
        faults = sequences.faults(connection, "eventsql", ["orders", "payments"])
        assert sorted(fault.sequence for fault in faults) == [
            BUFFER, '"eventsql"."log_line_eql_id_seq"', LOG, '"eventsql"."queue_message_eql_id_seq"',
        ]  # fmt: skip
        for fault in faults:
            session.execute(fault.remedy)
        assert sequences.faults(connection, "eventsql", ["orders", "payments"]) == []


@pytest.mark.parametrize("table", ["queue_message", "capture", "queue"])
def test_a_refused_id_of_another_table_names_the_doctor(platform: EventSQL, session: Connection, table: str) -> None:
    """As on a promoted logical replica."""
    session.execute("CREATE TABLE ride (id int PRIMARY KEY)")

    def use(name: str) -> None:
        Queue(platform, name).send(b"1")
        platform.capture("ride", "orders" if name == "jobs" else "payments")

    use("jobs")
    session.execute(f"ALTER SEQUENCE eventsql.{table}_eql_id_seq RESTART".encode())
    with pytest.raises(DatabaseError) as refused:
        use("mails")
    assert isinstance(refused.value.__cause__, psycopg.errors.UniqueViolation)
    assert "eventsql doctor" in refused.value.message


def test_ids_that_are_drawn_between_the_looks_are_no_fault(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    highest = sequences._highest

    def written_meanwhile(connection: Connection, schema: str, table: str) -> int:
        publish(platform, 1)
        platform.transfer.run_once()
        return highest(connection, schema, table)

    monkeypatch.setattr(sequences, "_highest", written_meanwhile)
    assert sequences.faults(session, "eventsql", ["orders", "payments"]) == []


def test_a_table_that_gets_its_first_row_between_the_looks_is_of_no_logical_replica(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    highest, table = sequences._highest, "event_buffer"

    def written_meanwhile(*given: Any) -> int:
        publish(platform, 1)
        return highest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "_highest", written_meanwhile)
        assert sequences.unused(session, "eventsql", [table]) == []
    session.execute(f"ALTER SEQUENCE {BUFFER} RESTART")
    assert [fault.sequence for fault in sequences.unused(session, "eventsql", [table])] == [BUFFER]
