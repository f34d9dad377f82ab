"""Whichever way an event is published, it is whole, in order, acknowledged after its commit, and fails for a reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    ConnectionLostError,
    DatabaseError,
    DatabaseUnavailableError,
    PartitionOutOfRangeError,
    RedefinitionError,
    TopicNotFoundError,
)
from eventsql_orchestration.publishing import publisher
from tests.forms import none_is, stored
from tests.publishing.conftest import order, prepare
from tests.publishing.ways import WAYS, Way
from tests.relay import held_commits, relayed

if TYPE_CHECKING:
    from eventsql_orchestration.database import Connection
    from tests.fixtures import Sessions, Until, UntilBlocked


TABLES = ("event_buffer", "orders_event")


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    way: Way = request.param
    monkeypatch.setattr(publisher, "STRAIGHT_LEAST", 1 if way.straight else 1_000_000)
    return way


pytestmark = [pytest.mark.both_forms, pytest.mark.prepared.with_args(prepare)]


@pytest.fixture(autouse=True)
def _remembered(platform: EventSQL) -> None:
    """A publisher knows its topics and does not look again for seconds."""
    platform.registry.cached_topic("orders")


def values(platform: EventSQL) -> list[bytes]:
    platform.transfer.run_once()
    return [event.value for event in platform.reader.read("orders")]


def test_events_are_acknowledged_after_their_commit_and_not_before(
    platform: EventSQL, way: Way, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    holding = sessions()
    for table in TABLES:
        holding.execute(f"LOCK TABLE eventsql.{table} IN SHARE MODE".encode())
    with ThreadPoolExecutor(1) as executor:
        publishing = executor.submit(way.publish, platform, [order(1), order(2)])
        until_blocked()
        assert not publishing.done()
        holding.rollback()
        assert publishing.result() == [None, None]
    assert sorted(values(platform)) == [b"1", b"2"]


COMMITTING = {name: way for name, way in WAYS.items() if not way.joined}


@pytest.mark.parametrize("way", COMMITTING.values(), ids=list(COMMITTING), indirect=True)
def test_an_event_whose_connection_is_lost_in_its_commit_fails_as_one_that_may_be_published(
    platform: EventSQL, way: Way, session: Connection, until: Until, until_blocked: UntilBlocked
) -> None:
    url = platform.database.url
    assert url.port is not None
    with relayed(url.port) as relay, EventSQL(url.set(port=relay.port).render_as_string(False), transfer=False) as far:
        far.registry.cached_topic("orders")
        with ThreadPoolExecutor(1) as executor, held_commits(session, "event_buffer", stored("orders")):
            publishing = executor.submit(way.publish, far, [order(1)])
            until_blocked()
            relay.cut()
            (outcome,) = publishing.result()
        assert isinstance(outcome, ConnectionLostError)
        until(lambda: values(platform) == [b"1"])
        assert way.publish(far, [order(2)]) == [None]


def test_an_event_keeps_its_value_key_metadata_partition_and_time(platform: EventSQL, way: Way) -> None:
    metadata = {"": "", 'quote"': "back\\slash", "żółw": "🚕", "json": '{"a": [1, null]}', "line": "a\nb\tc"}
    given = [
        Publication("orders", value, key=key, metadata=metadata, partition=partition)
        for value in (b"", b"\x00\x01\xff\\N", bytes(range(256)), b"x" * 1_000_000)
        for key, partition in ((None, 2), ("", None), ("42", None), ("a\tb\\n🚕", None))
    ]
    before = datetime.now(UTC) - timedelta(seconds=5)
    assert way.publish(platform, given) == [None] * len(given)
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    assert sorted((each.key or "-", each.value) for each in events) == sorted((e.key or "-", e.value) for e in given)
    for event in events:
        assert event.metadata == metadata
        assert event.key is not None or event.partition == 2
        assert before < event.buffered_at <= event.created_at < datetime.now(UTC) + timedelta(seconds=5)


def test_events_of_a_key_keep_their_order(platform: EventSQL, way: Way) -> None:
    for start in range(0, 600, 200):
        given = [order(number, key=str(number % 7)) for number in range(start, start + 200)]
        assert way.publish(platform, given) == [None] * 200
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    for key in range(7):
        assert [int(event.value) for event in events if event.key == str(key)] == list(range(key, 600, 7))


def test_an_event_that_cannot_be_published_fails_and_a_batch_with_it(platform: EventSQL, way: Way) -> None:
    good = [order(number) for number in range(300)]
    for times, (bad, error) in enumerate(
        [
            (Publication("nowhere", b""), TopicNotFoundError),
            (order("", partition=3), PartitionOutOfRangeError),
            (Publication("payments", b"", partition=0), PartitionOutOfRangeError),
        ],
        start=1,
    ):
        outcomes = way.publish(platform, [*good[:150], bad, *good[150:]])
        assert type(outcomes[150]) is error
        assert {type(each) for each in outcomes[:150] + outcomes[151:]} == {error if way.whole else type(None)}
        assert len(values(platform)) == (0 if way.whole else 300 * times)


def test_an_event_that_the_server_refuses_fails_and_a_batch_with_it(
    platform: EventSQL, way: Way, sessions: Sessions
) -> None:
    with sessions() as session:
        for table, condition in (("event_buffer", "eql_value <> 'bad'"), (stored("orders"), none_is("value", "bad"))):
            session.execute(f"ALTER TABLE eventsql.{table} ADD CONSTRAINT no_bad CHECK ({condition})".encode())
    given = [order(value, key="k") for value in ("1", "bad", "2", "bad", "3")]
    failed = [isinstance(outcome, DatabaseError) for outcome in way.publish(platform, given)]
    assert failed == ([True] * 5 if way.whole else [False, True, False, True, False])
    assert values(platform) == ([] if way.whole else [b"1", b"2", b"3"])


def test_a_publisher_that_remembers_an_old_definition_goes_by_the_new_one(
    platform: EventSQL, elsewhere: EventSQL, way: Way
) -> None:
    elsewhere.registry.unregister_topic("orders")
    elsewhere.registry.register_topic(Topic("orders", 2))
    outcomes = way.publish(platform, [order("", key=str(number)) for number in range(40)])
    platform.transfer.run_once()
    assert outcomes == [None] * 40
    assert {event.partition for event in platform.reader.read("orders")} == {0, 1}


def test_a_publisher_that_remembers_a_deleted_topic_publishes_nothing(
    platform: EventSQL, elsewhere: EventSQL, way: Way
) -> None:
    elsewhere.registry.unregister_topic("orders")
    outcomes = way.publish(platform, [order(number) for number in range(5)])
    assert {type(outcome) for outcome in outcomes} <= {TopicNotFoundError, RedefinitionError}
    assert platform.buffered() == {}


def test_a_server_that_goes_away_fails_the_events_under_way_and_no_later_ones(
    platform: EventSQL, way: Way, server: EmbeddedPostgres, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    sessions().execute(f"LOCK TABLE eventsql.event_buffer, eventsql.{stored('orders')} IN SHARE MODE")
    with ThreadPoolExecutor(1) as executor:
        publishing = executor.submit(way.publish, platform, [order("lost")] * 5)
        until_blocked()
        server.stop(mode="immediate")
        try:
            outcomes = publishing.result()
        finally:
            server.start()
    assert [isinstance(outcome, DatabaseUnavailableError) for outcome in outcomes] == [True] * 5
    assert way.publish(platform, [order("later")]) == [None]
    assert values(platform) == [b"later"]
