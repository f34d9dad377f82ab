"""Dead letters can be looked at, and published to their topic again: each once, and with a trace to its origin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.errors import TopicNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eventsql_orchestration import Event
    from eventsql_orchestration.database import Connection
    from tests.log.conftest import Sessions


@pytest.fixture
def letters(platform: EventSQL) -> list[Event]:
    """Five dead letters of a consumer that takes nothing."""
    platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key=f"k{number}", metadata={"source": "web"}) for number in range(5)
    )
    platform.transfer.run_once()

    def refuse(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("no")

    while platform.consumers.consume_once("orders", "mailer", refuse):
        pass
    platform.transfer.run_once()
    return platform.dead_letters.list("orders")


def redriven(platform: EventSQL) -> list[Event]:
    platform.transfer.run_once()
    return platform.reader.read("orders", after=5)


def test_dead_letters_are_listed_from_the_oldest_on(platform: EventSQL, letters: list[Event]) -> None:
    assert [letter.value for letter in letters] == [b"0", b"1", b"2", b"3", b"4"]
    assert platform.dead_letters.list("orders", limit=2) == letters[:2]


def test_a_topic_without_dead_letters_says_so(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments"))
    assert platform.dead_letters.topic_of("payments") is None
    with pytest.raises(TopicNotFoundError, match="payments_dlt"):
        platform.dead_letters.list("payments")
    with pytest.raises(TopicNotFoundError, match="payments_dlt"):
        platform.dead_letters.redrive("payments")


def test_redriven_events_are_what_they_were_and_name_their_dead_letter(
    platform: EventSQL, letters: list[Event]
) -> None:
    before = platform.reader.read("orders")
    assert platform.dead_letters.redrive("orders") == 5
    events = redriven(platform)
    assert [(e.key, e.value, e.partition) for e in events] == [(e.key, e.value, e.partition) for e in before]
    assert [event.metadata for event in events] == [
        {"source": "web", "redriven_from": f"orders_dlt:{letter.id}"} for letter in letters
    ]


def test_a_dead_letter_is_redriven_once(platform: EventSQL, letters: list[Event]) -> None:
    assert platform.dead_letters.redrive("orders") == 5
    assert platform.dead_letters.redrive("orders") == 0
    assert len(redriven(platform)) == 5
    assert platform.dead_letters.list("orders") == letters


def test_a_limit_redrives_the_oldest_and_the_next_call_goes_on(platform: EventSQL, letters: list[Event]) -> None:
    assert platform.dead_letters.redrive("orders", limit=2) == 2
    assert platform.dead_letters.redrive("orders", limit=0) == 0
    assert [event.value for event in redriven(platform)] == [b"0", b"1"]
    assert platform.dead_letters.redrive("orders", limit=100) == 3
    assert [event.value for event in redriven(platform)] == [b"0", b"1", b"2", b"3", b"4"]


def test_two_who_redrive_at_once_redrive_once(
    platform: EventSQL, letters: list[Event], sessions: Sessions, until_blocked: Callable[[], None]
) -> None:
    # The first redrive has published and not committed yet when the second comes.
    gate = sessions()
    platform.dead_letters.redrive("orders", limit=0)
    gate.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'orders_dlt' FOR UPDATE")
    with ThreadPoolExecutor(2) as executor:
        both = [executor.submit(platform.dead_letters.redrive, "orders") for _ in range(2)]
        until_blocked()
        gate.rollback()
        assert sorted(each.result() for each in both) == [0, 5]
    assert len(redriven(platform)) == 5


def test_a_redrive_that_fails_publishes_nothing(platform: EventSQL, letters: list[Event]) -> None:
    platform.registry.unregister_topic("orders", force=True)
    with pytest.raises(TopicNotFoundError):
        platform.dead_letters.redrive("orders")
    platform.registry.register_topic(Topic("orders", 2))
    assert platform.dead_letters.redrive("orders") == 5


def test_an_event_that_fails_again_is_a_dead_letter_again_and_traceable(
    platform: EventSQL, letters: list[Event]
) -> None:
    def refuse(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("still no")

    platform.dead_letters.redrive("orders", limit=1)
    platform.transfer.run_once()
    assert platform.consumers.consume_once("orders", "mailer", refuse) == 1
    platform.transfer.run_once()
    again = platform.dead_letters.list("orders")[-1]
    assert again.value == b"0"
    assert again.metadata["redriven_from"] == f"orders_dlt:{letters[0].id}"
    assert again.metadata["dlt_message"] == "still no"
