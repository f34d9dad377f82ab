"""A consumer with a filter is handed what matches; it passes over the rest in the same transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from eventsql_orchestration import EVERY_EVENT, Consumer, ConsumerState, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from tests.effects import effects, make_table, write

EVEN = EventFilter(metadata={"parity": "even"})

Way = Callable[..., int]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    make_table(platform)


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture(params=["in process", "claims"])
def consume(request: pytest.FixtureRequest, platform: EventSQL) -> Way:
    """One pass of a consumer, in each of the ways; gives the events consumed."""

    def in_process(handler: Handler, *, batch: int = 1_000) -> int:
        return platform.consumers.consume_once("orders", "mailer", handler, max_events=batch)

    def by_claims(handler: Handler, *, batch: int = 1_000) -> int:
        claimed = platform.claims.claim("orders", "mailer", owner="me", max_events=batch)
        if isinstance(claimed, NoClaim):
            return 0
        return platform.claims.process(claimed, handler, batch=batch).consumed

    return in_process if request.param == "in process" else by_claims


Handler = Callable[[Sequence[Event], Connection], object]


def register(platform: EventSQL, conditions: EventFilter | None = EVEN, *, max_attempts: int = 2) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=max_attempts, filter=conditions)


def fill(platform: EventSQL, parities: str) -> None:
    """An event for each letter: `e` is even, `o` is odd."""
    platform.publisher.publish_all(
        Publication("orders", b"", key=letter, metadata={"parity": "even" if letter == "e" else "odd"})
        for letter in parities
    )
    platform.transfer.run_once()


def failing_at(*ids: int) -> Handler:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if any(event.id in ids for event in events):
            raise ValueError("no")

    return handle


def state(platform: EventSQL) -> ConsumerState:
    (found,) = platform.registry.consumer("orders", "mailer")
    return found


def retry_now(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now()")


def test_only_what_matches_is_handed_over_and_counted(platform: EventSQL, consume: Way) -> None:
    register(platform)
    fill(platform, "oeoeeo")
    assert consume(write) == 3
    assert effects(platform) == [2, 4, 5]
    assert (state(platform).last_event_id, state(platform).consumed_events) == (6, 3)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT eql_first_event_id FROM eventsql.consumer").fetchone() == (2,)


def test_a_batch_without_a_matching_event_is_passed_without_a_call_of_the_handler(
    platform: EventSQL, consume: Way
) -> None:
    register(platform)
    fill(platform, "oooo")

    def refuse(events: Sequence[Event], connection: Connection) -> None:
        raise AssertionError("nothing matches")

    assert consume(refuse, batch=2) == consume(refuse, batch=2) == 0
    assert (state(platform).last_event_id, state(platform).consumed_events) == (4, 0)
    fill(platform, "e")
    assert consume(write, batch=2) == 1
    assert effects(platform) == [5]


def test_events_that_were_passed_over_do_not_count_as_lag(platform: EventSQL, consume: Way) -> None:
    register(platform)
    fill(platform, "ooo")
    assert platform.lag("orders")[0].events == 3
    consume(write)
    assert platform.lag("orders")[0].events == 0


def test_a_failing_event_is_retried_from_behind_what_was_passed(platform: EventSQL, consume: Way) -> None:
    register(platform)
    fill(platform, "oeooee")
    assert consume(failing_at(5)) == 1
    found = state(platform)
    assert (found.last_event_id, found.consumed_events) == (4, 1)
    assert (found.failed_event_id, found.attempts) == (5, 1)
    retry_now(platform)
    assert consume(failing_at()) == 2
    assert effects(platform) == [2, 5, 6]
    assert (state(platform).last_event_id, state(platform).consumed_events, state(platform).failing) == (6, 3, False)


def test_the_first_event_that_matches_may_fail(platform: EventSQL, consume: Way) -> None:
    register(platform)
    fill(platform, "ooeo")
    assert consume(failing_at(3)) == 0
    found = state(platform)
    assert (found.last_event_id, found.consumed_events, found.failed_event_id, found.attempts) == (2, 0, 3, 1)
    retry_now(platform)
    assert consume(failing_at(3)) == 0
    assert (state(platform).last_event_id, state(platform).attempts, state(platform).spent) == (2, 2, True)
    assert effects(platform) == []


def test_events_that_do_not_match_do_not_become_dead_letters(platform: EventSQL, consume: Way) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    register(platform, max_attempts=1)
    fill(platform, "oeoeo")
    while state(platform).last_event_id < 5:
        consume(failing_at(2, 1, 3))
    platform.transfer.run_once()
    assert effects(platform) == [4]
    assert state(platform).consumed_events == 2
    assert [letter.metadata["dlt_offset"] for letter in platform.reader.read("orders_dlt")] == ["2"]


def test_a_claim_whose_last_matching_event_is_buried_is_committed_to_its_end(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    register(platform, max_attempts=1)
    fill(platform, "oeooo")
    claimed = platform.claims.claim("orders", "mailer", owner="me")
    assert isinstance(claimed, Claim)
    processed = platform.claims.process(claimed, failing_at(2))
    assert (processed.consumed, processed.offset, processed.failure) == (1, 5, None)
    assert [(letter.event_id, letter.outcome) for letter in processed.dead_letters] == [(2, Failure.DEAD_LETTER)]
    assert platform.claims.get(claimed.id)[1] == "committed"
    assert state(platform).last_event_id == 5


def test_a_claim_that_fails_behind_what_it_passed_gives_the_rest_back(platform: EventSQL) -> None:
    register(platform)
    fill(platform, "oeoe")
    claimed = platform.claims.claim("orders", "mailer", owner="me")
    assert isinstance(claimed, Claim)
    processed = platform.claims.process(claimed, failing_at(4))
    assert processed.failure is not None
    assert (processed.consumed, processed.failure.event_id, processed.failure.outcome) == (1, 4, Failure.RETRY)
    assert platform.claims.get(claimed.id)[1] == "released"
    assert state(platform).last_event_id == 3


def test_a_consumer_of_single_events_gets_those_that_match(platform: EventSQL, until: Callable[..., None]) -> None:
    register(platform)
    fill(platform, "oeoeo")
    seen: list[int] = []
    with platform.consumers.start("orders", "mailer", lambda event, _: seen.append(event.id), polling_delay=0.01):
        until(lambda: state(platform).last_event_id == 5)
    assert seen == [2, 4]


# Changing a filter


def test_a_filter_is_changed_by_registering_again_and_holds_from_the_next_batch(
    platform: EventSQL, consume: Way
) -> None:
    register(platform)
    fill(platform, "oeoe")
    consume(write, batch=2)
    register(platform, EventFilter(keys=frozenset("o")))
    assert state(platform).last_event_id == 2
    consume(write, batch=2)
    assert effects(platform) == [2, 3]


def test_registering_with_every_event_takes_a_filter_away(platform: EventSQL, consume: Way) -> None:
    register(platform)
    platform.registry.register_consumer(Consumer("orders", "mailer"), filter=EVERY_EVENT)
    assert state(platform).filter is None
    with platform.database.connection() as connection:
        assert connection.execute("SELECT eql_filter IS NULL FROM eventsql.consumer").fetchone() == (True,)
    fill(platform, "oe")
    assert consume(write) == 2


def test_registering_the_same_filter_again_writes_nothing(platform: EventSQL) -> None:
    conditions = EventFilter(frozenset(["täglich", "b", "a"]), metadata={"y": "2", "x": "1"})

    def version() -> object:
        with platform.database.connection() as connection:
            return connection.execute("SELECT xmin::text FROM eventsql.consumer").fetchone()

    register(platform, conditions)
    assert state(platform).filter == conditions
    before = version()
    register(platform, EventFilter(frozenset(["a", "b", "täglich"]), metadata={"x": "1", "y": "2"}))
    assert version() == before


def test_every_partition_of_a_consumer_has_its_filter(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments", 3))
    platform.registry.register_consumer(Consumer("payments", "mailer", partitioned=True), filter=EVEN)
    assert [each.filter for each in platform.registry.consumer("payments", "mailer")] == [EVEN] * 3


def test_a_filter_that_this_version_does_not_know_lets_nothing_pass(platform: EventSQL, consume: Way) -> None:
    register(platform)
    fill(platform, "oe")
    with platform.database.connection() as connection:
        connection.execute("""UPDATE eventsql.consumer SET eql_filter = '{"sql": "true"}'""")
    with pytest.raises(ValidationError, match="does not understand"):
        consume(write)
    assert effects(platform) == []


def test_an_object_that_is_no_filter_is_refused(platform: EventSQL) -> None:
    with pytest.raises(ValidationError, match="not dict"):
        register(platform, {"keys": ["a"]})  # type: ignore[arg-type]  # refused
    assert platform.registry.consumers() == []


def test_one_pass_goes_past_any_number_of_events_that_do_not_match(platform: EventSQL) -> None:
    register(platform)
    fill(platform, "oooooooe")
    assert platform.consumers.consume_once("orders", "mailer", write, max_events=2) == 1
    assert effects(platform) == [8]
