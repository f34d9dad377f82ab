"""Errors at the boundary: wrong arguments, connections that cannot be used, and statements that the server refuses."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, EventFilter, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import NoClaim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    DatabaseError,
    EventSQLError,
    InvalidPublicationError,
    PermissionDeniedError,
    ValidationError,
)
from eventsql_orchestration.publishing.buffer_limits import MAX_FLUSHES, BufferLimits
from eventsql_orchestration.validation import MAX_ADDED_BYTES, MAX_METADATA_BYTES, Metadata


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "audit"))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda platform: platform.publisher.publish(None),
        lambda platform: platform.publisher.publish_all([None]),
        lambda platform: platform.transfer.run_once("orders"),
        lambda platform: platform.retention.run_once("orders"),
        lambda platform: platform.shards[0].announce("orders"),
        lambda platform: platform.consumers.start(None, "audit", lambda _event, _connection: None),
        lambda platform: platform.registry.register_consumer(Consumer("orders", "audit"), max_attempts=1.5),
        lambda platform: platform.registry.register_consumer(Consumer("orders", "audit"), max_attempts=True),
        lambda platform: platform.registry.register_consumer(Consumer("orders", "audit"), max_attempts=2**31),
        lambda platform: platform.registry.topic("a\x00b"),
        lambda platform: platform.registry.topic("\ud800"),
        lambda platform: platform.registry.unregister_topic("orders", force="no"),
        lambda platform: platform.reader.read("orders", limit=2**70),
        lambda platform: platform.reader.read("orders", after=10**5_000),
        lambda platform: platform.claims.claim("orders", "audit", owner="me", lease=float("nan")),
        lambda platform: platform.claims.claim("orders", "audit", owner="a\x00b"),
        lambda platform: platform.close(timeout="10"),
    ],
)
def test_a_wrong_argument_is_refused(platform: EventSQL, wrong: Callable[[EventSQL], object]) -> None:
    with pytest.raises(ValidationError):
        wrong(platform)
    assert platform.registry.consumer("orders", "audit")[0].max_attempts == 5


def test_a_stream_refuses_its_arguments_when_it_is_made(platform: EventSQL) -> None:
    with pytest.raises(ValidationError):
        platform.reader.stream("orders", batch=0)


def test_topics_may_come_one_by_one(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders", b""))
    assert platform.transfer.run_once(name for name in ["orders"]) == {"orders": 1}
    platform.publisher.publish(Publication("orders", b""))
    with pytest.raises(ValidationError):
        platform.transfer.run_once(name for name in ["orders", 7])  # type: ignore[misc]  # refused
    assert platform.buffered() == {"orders": 1}


@pytest.mark.parametrize("url", [None, 7, b"postgresql://x/y", "postgresql://x/\x00", "postgresql://x/\ud800"])
def test_a_platform_needs_a_url(url: Any) -> None:
    with pytest.raises(EventSQLError):
        EventSQL(url)


# What a value is made of


def test_a_publication_keeps_the_metadata_that_was_checked() -> None:
    mine = {"source": "web"}
    publication = Publication("orders", b"", metadata=mine)
    mine["source"] = "a\x00b"
    assert publication.metadata == {"source": "web"}
    with pytest.raises(TypeError):
        publication.metadata["source"] = "x"  # type: ignore[index]  # it cannot be changed
    assert pickle.loads(pickle.dumps(publication)) == publication
    assert isinstance(pickle.loads(pickle.dumps(publication)).metadata, Metadata)


def test_filters_keep_the_metadata_that_was_checked() -> None:
    for made in (EventFilter(metadata={"a": "b"}), LetterFilter(metadata={"a": "b"})):
        with pytest.raises(TypeError):
            made.metadata["a"] = "\x00"  # type: ignore[index]  # it cannot be changed


def test_metadata_has_a_bound_for_all_of_it_together() -> None:
    half = "x" * (MAX_METADATA_BYTES // 2)
    Publication("orders", b"", metadata={"a": half, "b": half[:-2]})
    with pytest.raises(InvalidPublicationError):
        Publication("orders", b"", metadata={"a": half, "b": half})
    with pytest.raises(InvalidPublicationError):
        Publication("orders", b"", metadata={"dlt_message": half, "b": half + "x" * MAX_ADDED_BYTES})


@pytest.mark.parametrize("name", ["max_attemps", "settings"])
def test_an_option_that_does_not_exist_is_refused(platform: EventSQL, name: str) -> None:
    wrong: Any = {name: 3}
    with pytest.raises(TypeError):
        platform.registry.register_consumer(Consumer("orders", "audit"), **wrong)
    with pytest.raises(TypeError):
        platform.consumers.start_batch("orders", "audit", lambda _events, _connection: None, **wrong)


def test_lanes_have_a_bound() -> None:
    with pytest.raises(ValidationError):
        BufferLimits(flushes=MAX_FLUSHES + 1)


@pytest.mark.parametrize("partition", [1.5, "1", True])
def test_a_partition_is_a_whole_number(partition: Any) -> None:
    with pytest.raises(ValidationError):
        Publication("orders", b"", partition=partition)


# Connections


def test_a_transaction_that_was_aborted_takes_no_event(platform: EventSQL, direct_dsn: str) -> None:
    with psycopg.connect(direct_dsn) as mine:
        with pytest.raises(psycopg.errors.DivisionByZero):
            mine.execute("SELECT 1 / 0")
        with pytest.raises(ValidationError):
            platform.publisher.publish(Publication("orders", b""), connection=mine)
        with pytest.raises(DatabaseError):
            platform.shards[0].dead_letters.topic_of("orders", mine)
        mine.rollback()
    assert platform.buffered() == {}


def test_a_claim_on_an_aborted_transaction_is_not_committed(platform: EventSQL, direct_dsn: str) -> None:
    platform.publisher.publish(Publication("orders", b""))
    platform.transfer.run_once()
    claim = platform.claims.claim("orders", "audit", owner="me")
    assert not isinstance(claim, NoClaim)
    with psycopg.connect(direct_dsn) as mine:
        with pytest.raises(psycopg.errors.DivisionByZero):
            mine.execute("SELECT 1 / 0")
        for act in (platform.claims.check, platform.claims.commit):
            with pytest.raises(ValidationError):
                act(mine, claim)
        mine.rollback()
    assert platform.registry.consumer("orders", "audit")[0].last_event_id == 0


# The server's refusals


@pytest.fixture
def reader_role(direct_dsn: str) -> Iterator[tuple[str, str]]:
    """A role that may read the topics and nothing else, and its URL."""
    role = f"role_{uuid.uuid4().hex}"
    name = sql.Identifier(role)
    with psycopg.connect(direct_dsn, autocommit=True) as owner:
        for statement in (
            "CREATE ROLE {} LOGIN PASSWORD 'secret'",
            "GRANT USAGE ON SCHEMA eventsql TO {}",
            "GRANT SELECT ON ALL TABLES IN SCHEMA eventsql TO {}",
        ):
            owner.execute(sql.SQL(statement).format(name))
        yield role, psycopg.conninfo.make_conninfo(direct_dsn, user=role, password="secret")
        owner.execute(sql.SQL("DROP OWNED BY {}").format(name))
        owner.execute(sql.SQL("DROP ROLE {}").format(name))


def url_of(conninfo: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(conninfo)
    return "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(**parts)


def test_a_privilege_that_is_missing_is_named_with_the_role(reader_role: tuple[str, str]) -> None:
    role, conninfo = reader_role
    with EventSQL(url_of(conninfo), transfer=False) as platform:
        assert [topic.name for topic in platform.registry.topics()] == ["orders"]
        for act in (
            lambda: platform.publisher.publish(Publication("orders", b"")),
            lambda: platform.publisher.publish_all([Publication("orders", b"")] * 100),
            lambda: platform.registry.register_topic(Topic("rides")),
            platform.transfer.run_once,
        ):
            with pytest.raises(PermissionDeniedError, match=role):
                act()


def test_errors_of_a_users_own_statements_stay_as_they_are(platform: EventSQL, reader_role: tuple[str, str]) -> None:
    _, conninfo = reader_role
    with pytest.raises(psycopg.errors.DivisionByZero), platform.database.connection() as connection:
        connection.execute("SELECT 1 / 0")
    with (
        EventSQL(url_of(conninfo), transfer=False) as restricted,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
        restricted.database.connection() as connection,
    ):
        connection.execute("SELECT pg_read_file('/etc/hostname')")


def test_an_error_of_a_handler_stays_unchanged(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders", b""))
    platform.transfer.run_once()

    def divide(_events: object, connection: Connection) -> None:
        connection.execute("SELECT 1 / 0")

    platform.consumers.consume_once("orders", "audit", divide)
    failure = platform.registry.consumer("orders", "audit")[0].failure
    assert failure is not None
    assert failure.startswith("DivisionByZero: ")


def test_an_error_of_an_iterator_of_publications_stays_unchanged(platform: EventSQL, direct_dsn: str) -> None:
    def publications() -> Iterator[Publication]:
        with psycopg.connect(direct_dsn) as mine:
            mine.execute("SELECT 1 / 0")
        yield Publication("orders", b"")

    with pytest.raises(psycopg.errors.DivisionByZero):
        platform.publisher.publish_all(publications())


def test_a_filter_looks_at_events_alone() -> None:
    event: Any = None
    with pytest.raises(ValidationError):
        EventFilter(key_prefix="a").matches(event)
