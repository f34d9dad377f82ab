"""A topic's log is made of segments: made ahead, found by reads, and adopted from a plain table without a rewrite."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, RegistryError
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.segment_drops import try_retain
from eventsql_orchestration.storage.segments import Segment, ensure_ahead, segment_name
from tests.forms import check_order, stored

if TYPE_CHECKING:
    from tests.fixtures import Sessions, UntilBlocked

SCHEMA = "eventsql"


def orders(platform: EventSQL, count: int) -> None:
    for number in range(count):
        platform.publisher.publish(Publication("orders", b"%d" % number, key=str(number)))
        platform.transfer.run_once()


def ranges(session: Connection, topic: str = "orders") -> list[tuple[int, int]]:
    return [(segment.start, segment.end) for segment in segments.segments(session, SCHEMA, topic) or ()]


def test_a_new_topic_has_a_segment_and_some_ahead(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    size = segments.SEGMENT_EVENTS
    assert ranges(session) == [(0, size), (size, 2 * size), (2 * size, 3 * size)]


def test_statistics_of_a_log_in_blocks_have_none_of_its_keys_and_values(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("orders", 2, storage="blocks"))
    for _ in range(3):
        platform.publisher.publish_all(Publication("orders", b"value", key=f"key-{key % 7}") for key in range(100))
        platform.transfer.run_once()
    segments.vacuum(session, SCHEMA, "orders")
    found = {attribute for (attribute,) in session.execute(_ANALYZED)}
    assert {"eql_id", "eql_partition"} <= found
    assert found & {"eql_keys", "eql_values"} == set()


_ANALYZED = "SELECT attname FROM pg_stats WHERE schemaname = 'eventsql' AND tablename ~ '^orders_'"
"""The columns of the tables of topic orders that have statistics."""


def test_the_last_segment_ends_at_the_largest_id(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders"))
    start, largest = 3 * segments.SEGMENT_EVENTS, 2**63 - 1
    session.execute("SELECT setval(%s, %s)", [f"eventsql.{stored('orders')}_eql_id_seq", largest - 15])
    for _ in range(2):
        session.execute("SELECT eventsql.make_segments('orders', 10, 5)")
        assert ranges(session)[3:] == [(start, largest - 5), (largest - 5, largest)]


@pytest.mark.usefixtures("small_segments")
def test_segments_are_made_before_their_ids_come(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    orders(platform, 45)
    assert ranges(session) == [(start, start + 10) for start in range(0, 70, 10)]
    assert [event.value for event in platform.reader.read("orders")] == [b"%d" % number for number in range(45)]
    for partition in (0, 1):
        read = platform.reader.read("orders", partition=partition, after=7, limit=12)
        assert [event.id for event in read] == sorted(event.id for event in read if event.id > 7)
        assert len(read) == 12


@pytest.mark.usefixtures("small_segments")
@pytest.mark.usefixtures("single_rows")
def test_a_batch_longer_than_all_segments_goes_through_the_buffer_and_is_moved_in_pieces_that_fit(
    platform: EventSQL,
) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(200))
    assert platform.reader.end("orders") == 0, "the straight path found no segment for its ids"
    assert platform.buffered() == {"orders": 200}
    platform.shards[0].transfer._writer._sizes._fixed = 15
    assert platform.transfer.run_once() == {"orders": 200}
    check_order(platform.reader.read("orders"), [str(number) for number in range(200)])


def test_names_of_segments_fit_and_differ_for_any_topic() -> None:
    topics = ["a", "a" * 57, "a" * 56 + "b", "a_event", "event"]
    names = [segment_name(topic, start) for topic in topics for start in (0, 5, 2**63 - 1)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 63


def test_a_topic_with_the_longest_name_has_segments(platform: EventSQL, session: Connection) -> None:
    name = "t" * 57
    platform.registry.register_topic(Topic(name, 2))
    platform.publisher.publish_all(Publication(name, b"") for _ in range(100))
    assert platform.reader.count(name) == 100
    assert len(ranges(session, name)) == 3
    platform.registry.unregister_topic(name, force=True)
    left = session.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'ttt%'").fetchone()
    assert left == (0,)


@pytest.mark.usefixtures("small_segments")
def test_segments_are_attached_while_others_read_and_hold_the_log(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    orders(platform, 35)
    assert platform.reader.count("orders") == 35
    reading.commit()


@pytest.mark.usefixtures("small_segments")
def test_a_rolled_log_goes_on_in_its_next_segment(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    orders(platform, 3)
    with session.transaction():
        existing = segments.segments(session, SCHEMA, "orders")
        assert existing is not None
        segments.roll(session, SCHEMA, "orders", existing[0])
    orders(platform, 2)
    assert [event.id for event in platform.reader.read("orders")] == [1, 2, 3, 10, 11]
    assert ranges(session)[:3] == [(0, 10), (10, 20), (20, 30)]


# A plain table, as EventSQL's Java library makes it


PLAIN = """
INSERT INTO eventsql.topic (eql_name, eql_partitions) VALUES ('plain', 2);
INSERT INTO eventsql.event_buffer_lock (eql_topic) VALUES ('plain');
CREATE TABLE eventsql.plain_event (
    eql_id bigserial PRIMARY KEY, eql_partition smallint NOT NULL, eql_key text, eql_value bytea NOT NULL,
    eql_buffered_at timestamp NOT NULL, eql_created_at timestamp NOT NULL DEFAULT now(), eql_metadata json NOT NULL
);
"""


@pytest.fixture
def plain(platform: EventSQL, session: Connection) -> EventSQL:
    session.execute(PLAIN)
    platform.publisher.publish_all(Publication("plain", b"%d" % number, key=str(number)) for number in range(100))
    platform.transfer.run_once()
    assert platform.reader.count("plain") == 100
    return platform


def test_a_plain_table_becomes_the_first_segment_without_a_rewrite(plain: EventSQL, session: Connection) -> None:
    before, end = plain.reader.read("plain"), plain.reader.end("plain")
    file = session.execute("SELECT pg_relation_filenode('eventsql.plain_event')").fetchone()
    segments.adopt(session, SCHEMA, "plain")
    first = Segment(segment_name("plain", 0), 0, end + segments.SEGMENT_EVENTS, 0, detaching=False, log="plain_event")
    existing = segments.segments(session, SCHEMA, "plain")
    assert existing is not None
    found, *ahead = existing
    assert (found.table, found.start, found.end, found.detaching) == (first.table, 0, first.end, False)
    assert len(ahead) == segments.SEGMENTS_AHEAD
    name = sql.Identifier(SCHEMA, first.table).as_string(session)
    assert session.execute("SELECT pg_relation_filenode(%s)", [name]).fetchone() == file
    assert plain.reader.read("plain") == before
    plain.publisher.publish_all(Publication("plain", b"next", key="k") for _ in range(100))
    plain.transfer.run_once()
    assert [event.id for event in plain.reader.read("plain", after=end)] == list(range(end + 1, end + 101))
    segments.adopt(session, SCHEMA, "plain")
    assert len(segments.segments(session, SCHEMA, "plain") or ()) == 1 + segments.SEGMENTS_AHEAD


def test_an_adopted_log_is_deleted_whole(plain: EventSQL, session: Connection) -> None:
    segments.adopt(session, SCHEMA, "plain")
    plain.registry.unregister_topic("plain", force=True)
    assert session.execute("SELECT relname FROM pg_class WHERE relname LIKE 'plain%'").fetchall() == []


def test_adoption_waits_for_the_transfer_that_holds_the_topic(
    plain: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    holder = sessions()
    holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'plain' FOR UPDATE")
    with ThreadPoolExecutor() as executor:
        adopting = executor.submit(segments.adopt, session, SCHEMA, "plain")
        until_blocked()
        holder.execute(
            "INSERT INTO eventsql.plain_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            "VALUES (0, 'late', now(), '{}')"
        )
        holder.commit()
        adopting.result()
    assert [event.value for event in plain.reader.read("plain")][-1] == b"late"


def test_an_adoption_that_fails_leaves_the_table_as_it_was(
    plain: EventSQL, session: Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = sessions()
    holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'plain' FOR UPDATE")
    monkeypatch.setattr(segments, "LOCK_SECONDS", 0.01)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        segments.adopt(session, SCHEMA, "plain")
    holder.rollback()
    checks = session.execute(
        "SELECT count(*) FROM pg_constraint WHERE conrelid = 'eventsql.plain_event'::regclass AND contype = 'c'"
    ).fetchone()
    assert checks == (0,)
    assert segments.segments(session, SCHEMA, "plain") is None
    with session.transaction():
        ensure_ahead(session, SCHEMA, "plain")
    plain.publisher.publish(Publication("plain", b"on"))
    assert plain.transfer.run_once() == {"plain": 1}


def test_the_first_segment_of_a_plain_table_ends_at_the_largest_id(plain: EventSQL, session: Connection) -> None:
    largest = 2**63 - 1
    session.execute("SELECT setval('eventsql.plain_event_eql_id_seq', %s)", [largest - 100])
    segments.adopt(session, SCHEMA, "plain")
    assert ranges(session, "plain") == [(0, largest)]
    plain.publisher.publish(Publication("plain", b"last"))
    plain.transfer.run_once()
    assert plain.reader.end("plain") == largest - 99


def test_a_change_of_the_form_adopts_no_table_while_retention_may_adopt_it(
    plain: EventSQL, session: Connection, sessions: Sessions
) -> None:
    assert try_retain(sessions(), SCHEMA, "plain")
    with pytest.raises(DatabaseBusyError):
        plain.registry.set_storage("plain", "blocks", timeout=0)
    assert segments.segments(session, SCHEMA, "plain") is None


def test_roles_that_could_read_a_plain_table_can_read_the_log(
    plain: EventSQL, session: Connection, request: pytest.FixtureRequest
) -> None:
    role = "reader_of_plain"
    session.execute(f"CREATE ROLE {role}")
    request.addfinalizer(lambda: session.execute(f"DROP OWNED BY {role}; DROP ROLE {role}"))
    session.execute(f"GRANT SELECT ON eventsql.plain_event TO {role}; GRANT INSERT ON eventsql.plain_event TO PUBLIC")
    segments.adopt(session, SCHEMA, "plain")
    rights = session.execute(
        "SELECT has_table_privilege(%(role)s, 'eventsql.plain_event', 'SELECT'), "
        "has_table_privilege(%(role)s, 'eventsql.plain_event', 'INSERT'), "
        "has_table_privilege(%(role)s, 'eventsql.plain_event', 'DELETE')",
        {"role": role},
    ).fetchone()
    assert rights == (True, True, False)


@pytest.mark.parametrize(
    ("what", "made"),
    [
        ("view seen", "CREATE VIEW eventsql.seen AS SELECT eql_id FROM eventsql.plain_event"),
        ("policy own", "CREATE POLICY own ON eventsql.plain_event USING (eql_partition = 0)"),
        ("row security", "ALTER TABLE eventsql.plain_event ENABLE ROW LEVEL SECURITY"),
        ("publication changes", "CREATE PUBLICATION changes FOR TABLE eventsql.plain_event"),
        (
            "foreign key noted_event_fkey",
            "CREATE TABLE eventsql.noted (event bigint REFERENCES eventsql.plain_event)",
        ),
        ("child table late", "CREATE TABLE eventsql.late () INHERITS (eventsql.plain_event)"),
        (
            "function newest()",
            "CREATE FUNCTION eventsql.newest() RETURNS int BEGIN ATOMIC SELECT 1 FROM eventsql.plain_event; END",
        ),
    ],
)
def test_a_table_that_something_hangs_on_is_not_adopted(
    plain: EventSQL, session: Connection, what: str, made: str
) -> None:
    """It would stay with the first segment: a policy would not guard the log any more, a publication not see it."""
    session.execute(made.encode())
    session.execute("SET search_path TO eventsql")
    with pytest.raises(RegistryError, match=re.escape(f"{what} would stay")):
        segments.adopt(session, SCHEMA, "plain")
    with pytest.raises(RegistryError, match="cannot have another form yet"):
        plain.registry.set_storage("plain", "blocks")
    assert plain.reader.count("plain") == 100
    assert segments.segments(session, SCHEMA, "plain") is None


@pytest.mark.usefixtures("small_segments")
@pytest.mark.usefixtures("single_rows")
def test_room_that_another_library_has_used_up_is_made_by_the_next_transfer_or_publisher(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    orders(platform, 1)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1_000_000)
    orders(platform, 1)
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 200)")
    orders(platform, 1)
    assert [event.id for event in platform.reader.read("orders")][-1] > 200
    straight = [Publication("orders", b"") for _ in range(60)]
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 500)")
    platform.publisher.publish_all(straight)
    platform.shards[0].transfer._writer._sizes._fixed = 15
    platform.transfer.run_once()
    assert platform.reader.count("orders") == 63


@pytest.mark.usefixtures("small_segments")
def test_retention_makes_room_for_topics_that_other_programs_write(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 25)")
    platform.retention.run_once()
    assert ranges(session)[-1] == (40, 50)


def test_an_adoption_that_was_killed_does_not_stop_the_log(plain: EventSQL, session: Connection) -> None:
    end = plain.reader.end("plain")
    session.execute(
        f"ALTER TABLE eventsql.plain_event ADD CONSTRAINT {segments.ADOPTION_CHECK} "
        f"CHECK (eql_id <= {end + 5}) NOT VALID"
    )
    plain.publisher.publish_all(Publication("plain", b"") for _ in range(100))
    assert plain.transfer.run_once() == {"plain": 100}
