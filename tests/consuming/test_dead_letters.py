"""Dead letters can be looked at, and published to their topic again: each once, and with a trace to its origin."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import dead_letter_values
from eventsql_orchestration.consuming import dead_letters as module
from eventsql_orchestration.consuming.dead_letters import LetterFilter, RedrivePlan
from eventsql_orchestration.database import Queries
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, TopicNotFoundError, ValidationError
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.topics.partitioner import partition_of_key
from eventsql_orchestration.validation import MAX_METADATA_BYTES
from tests.forms import stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from eventsql_orchestration import Event
    from eventsql_orchestration.consuming.dead_letters import DeadLetter
    from eventsql_orchestration.database import Connection
    from tests.fixtures import Sessions, Terminate, Until, UntilBlocked

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def give_up(platform: EventSQL, consumer: str = "mailer") -> None:
    """Let a consumer of one attempt give up all that it has left."""

    def refuse(events: Sequence[Event], connection: Connection) -> None:
        raise KeyError("odd") if int(events[0].value) % 2 else ValueError("even")

    while platform.consumers.consume_once("orders", consumer, refuse):
        pass
    platform.transfer.run_once()


def prepare(platform: EventSQL) -> None:
    """Make six dead letters of `mailer`, then the one of `audit`, given up in one hour each from noon on."""
    platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key=f"k{number % 3}", metadata={"source": "web" if number < 4 else "app"})
        for number in range(6)
    )
    platform.transfer.run_once()
    give_up(platform)
    platform.registry.register_consumer(Consumer("orders", "audit"), max_attempts=1)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 5 WHERE eql_name = 'audit'")
        give_up(platform, "audit")
        connection.execute(
            "UPDATE eventsql.orders_dlt_event SET eql_buffered_at = %s + (eql_id - 1) * interval '1 hour'", (NOON,)
        )
        # They were not given up before there was a topic.
        connection.execute("UPDATE eventsql.topic SET eql_created_at = '2025-01-01'")


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def letters(platform: EventSQL) -> list[DeadLetter]:
    """The prepared dead letters."""
    return platform.dead_letters.list("orders")


def ids_of(letters: Iterable[DeadLetter]) -> list[int]:
    return [letter.id for letter in letters]


def redriven(platform: EventSQL) -> list[Event]:
    platform.transfer.run_once()
    return platform.reader.read("orders", after=6)


def redriven_from(platform: EventSQL) -> list[int]:
    """The ids of the letters that events were redriven from, in order."""
    return [int(event.metadata["redriven_from"].removeprefix("orders_dlt:")) for event in redriven(platform)]


# Looking


def test_dead_letters_are_listed_from_the_oldest_on(platform: EventSQL, letters: list[DeadLetter]) -> None:
    assert [letter.value for letter in letters] == [b"0", b"1", b"2", b"3", b"4", b"5", b"5"]
    assert ids_of(platform.dead_letters.list("orders", limit=2)) == [1, 2]
    assert platform.dead_letters.list("orders", limit=0) == []


def test_a_dead_letter_is_shown_with_where_it_comes_from_and_whether_it_was_redriven(
    platform: EventSQL, letters: list[DeadLetter]
) -> None:
    letter = platform.dead_letters.show("orders", 2)
    assert (letter, letter.key, letter.consumer) == (letters[1], "k1", "mailer")
    assert letter.origin == f"orders:{letter.metadata['dlt_partition']}:2"
    assert letter.redriven_at is None
    before = datetime.now(UTC)
    platform.dead_letters.redrive("orders", LetterFilter(ids=[2]))
    redriven_at = platform.dead_letters.show("orders", 2).redriven_at
    assert redriven_at is not None
    assert before - timedelta(minutes=1) < redriven_at < datetime.now(UTC) + timedelta(minutes=1)
    assert ids_of(platform.dead_letters.list("orders", redriven=True)) == [2]
    assert ids_of(platform.dead_letters.list("orders", redriven=False, limit=3)) == [1, 3, 4]


def test_a_letter_of_another_program_is_shown_without_an_origin(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders_dlt", b"?", metadata={"dlt_partition": "x"}))
    platform.transfer.run_once()
    letter = platform.dead_letters.show("orders", 8)
    assert (letter.origin, letter.consumer) == (None, None)


FILTERS = [
    (LetterFilter(), [1, 2, 3, 4, 5, 6, 7]),
    (LetterFilter(consumer="audit"), [7]),
    (LetterFilter(exception="KeyError"), [2, 4, 6, 7]),
    (LetterFilter(key="k1"), [2, 5]),
    (LetterFilter(metadata={"source": "app"}), [5, 6, 7]),
    (LetterFilter(metadata={"source": "app", "dlt_consumer": "mailer"}), [5, 6]),
    (LetterFilter(metadata={"source": "app", "unknown": ""}), []),
    (LetterFilter(after=2, upto=4), [3, 4]),
    (LetterFilter(after=7), []),
    (LetterFilter(ids=[6, 1, 1]), [1, 6]),
    (LetterFilter(ids=(number for number in (3, 2))), [2, 3]),  # type: ignore[arg-type]  # read once
    (LetterFilter(ids=[]), []),
    (LetterFilter(since=NOON + timedelta(hours=5)), [6, 7]),
    (LetterFilter(until=NOON + timedelta(hours=1)), [1]),
    (LetterFilter(until=(NOON + timedelta(hours=1)).astimezone(timezone(timedelta(hours=9)))), [1]),
    (LetterFilter(since=NOON + timedelta(hours=1), until=NOON + timedelta(hours=3)), [2, 3]),
    (LetterFilter(consumer="mailer", exception="KeyError", key="k0", ids=[1, 4, 7], after=1), [4]),
]


@pytest.mark.parametrize(("wanted", "expected"), FILTERS)
def test_listing_planning_and_redriving_choose_the_same_letters_by_a_filter(
    platform: EventSQL, wanted: LetterFilter, expected: list[int]
) -> None:
    assert ids_of(platform.dead_letters.list("orders", wanted)) == expected
    assert platform.dead_letters.plan_redrive("orders", wanted) == RedrivePlan(len(expected), 0, len(expected))
    assert platform.dead_letters.redrive("orders", wanted) == len(expected)
    assert redriven_from(platform) == expected
    assert ids_of(platform.dead_letters.list("orders", wanted, redriven=True)) == expected
    assert platform.dead_letters.plan_redrive("orders", wanted) == RedrivePlan(len(expected), len(expected), 0)


def test_metadata_that_another_program_wrote_as_numbers_is_compared_as_text(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("""UPDATE eventsql.orders_dlt_event SET eql_metadata = '{"tries": 3}' WHERE eql_id = 4""")
    assert ids_of(platform.dead_letters.list("orders", LetterFilter(metadata={"tries": "3"}))) == [4]
    platform.dead_letters.redrive("orders", LetterFilter(ids=[4]))
    (event,) = redriven(platform)
    assert event.metadata == {"tries": "3", "redriven_from": "orders_dlt:4"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ids": [0]}, "id of a dead letter must be a whole number"),
        ({"ids": ["1"]}, "id of a dead letter must be a whole number"),
        ({"ids": "12"}, "ids must be several values"),
        ({"ids": 12}, "ids must be several values"),
        ({"after": -1}, "after must be a whole number"),
        ({"after": 5, "upto": 4}, "after 5 up to 4"),
        ({"since": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001 - it is what is refused
        ({"since": NOON, "until": NOON - timedelta(hours=1)}, "not a range of times"),
        ({"consumer": 3}, "consumer must be text"),
        ({"key": "nul\x00"}, "NUL"),
        ({"metadata": {"tries": 3}}, "metadata 'tries' must be text"),
        ({"metadata": "tries=3"}, "must be a mapping"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LetterFilter(**wrong)


def test_ids_that_no_letter_has_are_named_before_anything_is_redriven(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    wanted = LetterFilter(ids=[1, 2, 3, 98, 99])
    for use in (platform.dead_letters.redrive, platform.dead_letters.plan_redrive, platform.dead_letters.list):
        with pytest.raises(EventSQLError, match="'orders_dlt' has no event at offset 98"):
            use("orders", wanted)
    with pytest.raises(
        EventSQLError, match=r"'orders_dlt' has no event at offset 99: list .* `eventsql dlt list orders`"
    ):
        platform.dead_letters.show("orders", 99)
    with pytest.raises(ValidationError):
        platform.dead_letters.show("orders", 0)
    for limit in (-1, True, "1"):
        with pytest.raises(ValidationError, match="limit"):
            platform.dead_letters.redrive("orders", limit=limit)  # type: ignore[arg-type]  # it is what is refused
    assert redriven(platform) == []


def test_a_topic_without_dead_letters_says_so(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments"))
    assert platform.dead_letters.topic_of("payments") is None
    assert not platform.dead_letters.accepts("payments")
    uses: tuple[Callable[[str], object], ...] = (
        platform.dead_letters.list,
        platform.dead_letters.redrive,
        platform.dead_letters.plan_redrive,
        platform.dead_letters.prune,
        lambda topic: platform.dead_letters.show(topic, 1),
    )
    for use in uses:
        with pytest.raises(TopicNotFoundError, match=r"no dead letter topic: .*`eventsql topic create payments_dlt`"):
            use("payments")
        with pytest.raises(TopicNotFoundError, match="topic 'nowhere' does not exist"):
            use("nowhere")
        with pytest.raises(TopicNotFoundError, match="name the topic of the original events, 'orders'"):
            use("orders_dlt")


# Redriving


def test_redriven_events_are_what_they_were_and_name_where_they_come_from(
    platform: EventSQL, letters: list[DeadLetter]
) -> None:
    before = platform.reader.read("orders")
    assert platform.dead_letters.redrive("orders", LetterFilter(consumer="mailer")) == 6
    events = redriven(platform)
    assert [(e.key, e.value, e.partition) for e in events] == [(e.key, e.value, e.partition) for e in before]
    assert [event.metadata for event in events] == [
        {
            "source": original.metadata["source"],
            "redriven_from": f"orders_dlt:{letter.id}",
            "redriven_consumer": "mailer",
            "redriven_origin": f"orders:{original.partition}:{original.id}",
        }
        for letter, original in zip(letters[:6], before, strict=True)
    ]


def test_metadata_of_the_event_that_only_looks_like_ours_is_kept(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders", b"9", metadata={"dlt_color": "red"}))
    platform.transfer.run_once()
    give_up(platform)
    platform.dead_letters.redrive("orders", LetterFilter(after=7))
    assert redriven(platform)[-1].metadata["dlt_color"] == "red"


@pytest.mark.parametrize("added", [0, 1, 1_000_000], ids=["alone", "before a shard was added", "since then"])
def test_an_event_goes_back_to_its_partition_even_if_that_is_not_its_keys(platform: EventSQL, added: int) -> None:
    with platform.database.connection() as connection:
        # Adding a shard changes a topic's layout and not its partitions.
        connection.execute("UPDATE eventsql.topic SET eql_layout = eql_layout + %s", [added])
    platform.publisher.publish_all(
        Publication("orders", b"9", key=key, partition=partition) for key in ("k0", None) for partition in (0, 1)
    )
    platform.transfer.run_once()
    give_up(platform)
    platform.dead_letters.redrive("orders", LetterFilter(after=7))
    assert {(event.key, event.partition) for event in redriven(platform)[-4:]} == {
        ("k0", 0), ("k0", 1), (None, 0), (None, 1),
    }  # fmt: skip


def test_an_event_with_as_much_metadata_as_it_may_have_is_given_up_and_redriven_again_and_again(
    platform: EventSQL,
) -> None:
    metadata = {"note": "x" * (MAX_METADATA_BYTES - len("note"))}
    platform.publisher.publish(Publication("orders", b"9", metadata=metadata))
    for letter in (8, 9):
        platform.transfer.run_once()
        give_up(platform)
        assert platform.dead_letters.show("orders", letter).metadata["dlt_exception"] == "KeyError"
        assert platform.dead_letters.redrive("orders", LetterFilter(ids=[letter])) == 1
    (event,) = redriven(platform)[-1:]
    assert event.metadata["redriven_before"] == "orders_dlt:8"
    assert event.metadata["note"] == metadata["note"]


def test_in_a_topic_that_was_made_anew_the_key_decides(platform: EventSQL) -> None:
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", 31))
    platform.dead_letters.redrive("orders", LetterFilter(consumer="mailer"))
    platform.publisher.publish_all(Publication("orders", b"", key=f"k{number % 3}") for number in range(6))
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    assert len(events) == 12
    assert len({(event.key, event.partition) for event in events}) == 3


def test_letters_are_redriven_though_another_process_has_just_changed_the_partitions(
    platform: EventSQL, dsn: str
) -> None:
    platform.registry.cached_topic("orders")
    with EventSQL(dsn, transfer=False) as other:
        other.repartitioner.repartition("orders", 5)
    assert platform.dead_letters.redrive("orders") == 7
    events = redriven(platform)
    assert [event.partition for event in events] == [partition_of_key(str(event.key), 5) for event in events]


def test_letters_of_several_batches_keep_their_order(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    assert platform.dead_letters.redrive("orders", LetterFilter(ids=[1, 2, 3, 5, 6, 7])) == 6
    assert platform.dead_letters.redrive("orders", again=True, limit=5) == 5
    assert redriven_from(platform) == [1, 2, 3, 5, 6, 7, 1, 2, 3, 4, 5]


def batches(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events each transaction of a redrive publishes from here on."""
    sizes: list[int] = []
    publish_all = platform.shards[0].publisher.publish_all

    def watched(publications: Iterable[Publication], **options: Any) -> int:
        sizes.append(publish_all(publications, **options))
        return sizes[-1]

    monkeypatch.setattr(platform.shards[0].publisher, "publish_all", watched)
    return sizes


def test_large_letters_go_in_small_batches(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.orders_dlt_event SET eql_value = repeat('x', 100)::bytea WHERE eql_id > 4")
    monkeypatch.setattr(module, "BATCH_BYTES", 103)
    sizes = batches(platform, monkeypatch)
    assert platform.dead_letters.redrive("orders") == 7
    assert sizes == [4, 1, 1, 1]


def test_letters_committed_before_a_failure_are_not_redriven_again(
    platform: EventSQL, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 3)
    publish_all = platform.shards[0].publisher.publish_all
    lost = iter((False, True))

    def losing(publications: Iterable[Publication], **options: Any) -> int:
        published = publish_all(publications, **options)
        if next(lost):
            terminate(options["connection"])
        return published

    with monkeypatch.context() as patched:
        patched.setattr(platform.shards[0].publisher, "publish_all", losing)
        with pytest.raises(DatabaseUnavailableError):
            platform.dead_letters.redrive("orders")
    assert redriven_from(platform) == [1, 2, 3]
    assert platform.dead_letters.redrive("orders") == 4
    assert redriven_from(platform) == [1, 2, 3, 4, 5, 6, 7]


def test_a_redrive_that_fails_publishes_nothing(platform: EventSQL) -> None:
    platform.registry.unregister_topic("orders", force=True)
    with pytest.raises(TopicNotFoundError):
        platform.dead_letters.redrive("orders")
    platform.registry.register_topic(Topic("orders", 2))
    assert platform.dead_letters.redrive("orders") == 7


def test_letters_that_come_while_a_redrive_runs_are_left_for_the_next(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 3)
    publish_all = platform.shards[0].publisher.publish_all

    def failing_again(publications: Iterable[Publication], **options: Any) -> int:
        with platform.database.connection() as other:
            other.execute(
                "INSERT INTO eventsql.orders_dlt_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
                "VALUES (-1, '', now(), '{}')"
            )
        return publish_all(publications, **options)

    with monkeypatch.context() as patched:
        patched.setattr(platform.shards[0].publisher, "publish_all", failing_again)
        assert platform.dead_letters.redrive("orders", again=True) == 7
    assert platform.dead_letters.redrive("orders") == 3


# Once


def test_a_dead_letter_is_redriven_once_by_whichever_filters(platform: EventSQL) -> None:
    redrive = platform.dead_letters.redrive
    assert redrive("orders", LetterFilter(ids=[6, 3])) == 2
    assert redrive("orders", LetterFilter(consumer="mailer", exception="KeyError")) == 2
    assert redrive("orders", LetterFilter(key="k0")) == 1
    assert redrive("orders", LetterFilter(since=NOON + timedelta(hours=6))) == 1
    assert redrive("orders", LetterFilter(after=0, upto=5)) == 1
    assert redrive("orders") == 0
    assert redriven_from(platform) == [3, 6, 2, 4, 1, 7, 5]


def test_a_limit_redrives_the_oldest_and_the_next_call_goes_on(platform: EventSQL) -> None:
    assert platform.dead_letters.plan_redrive("orders", limit=2) == RedrivePlan(7, 0, 2)
    assert platform.dead_letters.redrive("orders", limit=2) == 2
    assert platform.dead_letters.redrive("orders", limit=0) == 0
    assert platform.dead_letters.plan_redrive("orders", limit=100) == RedrivePlan(7, 2, 5)
    assert platform.dead_letters.redrive("orders", limit=100) == 5
    assert redriven_from(platform) == [1, 2, 3, 4, 5, 6, 7]


def test_dismissed_letters_are_not_published_and_not_open(platform: EventSQL) -> None:
    assert platform.dead_letters.dismiss("orders", LetterFilter(exception="KeyError"), limit=2) == 2
    assert platform.dead_letters.dismiss("orders", LetterFilter(upto=4)) == 2
    assert redriven_from(platform) == []
    assert ids_of(platform.dead_letters.list("orders", redriven=True)) == [1, 2, 3, 4]
    assert ids_of(platform.dead_letters.list("orders", redriven=False)) == [5, 6, 7]
    assert platform.dead_letters.plan_redrive("orders") == RedrivePlan(7, 4, 3)
    assert platform.dead_letters.redrive("orders") == 3
    assert platform.dead_letters.dismiss("orders") == 0
    assert redriven_from(platform) == [5, 6, 7]


def test_a_dismissed_letter_is_redriven_on_request(platform: EventSQL) -> None:
    wanted = LetterFilter(ids=[2])
    platform.dead_letters.dismiss("orders", wanted)
    letter = platform.dead_letters.show("orders", 2)
    assert (letter.redriven_at, letter.dismissed_at is None) == (None, False)
    assert platform.dead_letters.redrive("orders", wanted, again=True) == 1
    letter = platform.dead_letters.show("orders", 2)
    assert (letter.redriven_at is None, letter.dismissed_at) == (False, None)
    assert redriven_from(platform) == [2]


def test_an_unknown_dead_letter_is_not_dismissed(platform: EventSQL) -> None:
    with pytest.raises(EventSQLError, match="no event at offset 8"):
        platform.dead_letters.dismiss("orders", LetterFilter(ids=[1, 8]))
    with pytest.raises(TopicNotFoundError, match="unknown"):
        platform.dead_letters.dismiss("unknown")
    assert platform.dead_letters.plan_redrive("orders") == RedrivePlan(7, 0, 7)


def test_a_redriven_letter_is_redriven_again_on_request(platform: EventSQL) -> None:
    platform.dead_letters.redrive("orders", LetterFilter(ids=[2]))
    first = platform.dead_letters.show("orders", 2).redriven_at
    wanted = LetterFilter(upto=3)
    assert platform.dead_letters.plan_redrive("orders", wanted, again=True) == RedrivePlan(3, 1, 3)
    assert platform.dead_letters.redrive("orders", wanted, again=True) == 3
    assert redriven_from(platform) == [2, 1, 2, 3]
    second = platform.dead_letters.show("orders", 2).redriven_at
    assert first is not None
    assert second is not None
    assert second > first
    assert platform.dead_letters.redrive("orders", wanted) == 0


def test_two_who_redrive_at_once_redrive_once(platform: EventSQL, sessions: Sessions, until: Until) -> None:
    gate = sessions()
    gate.execute("LOCK TABLE eventsql.redriven_dead_letter IN SHARE MODE")
    watch = sessions()
    watch.autocommit = True

    def both_wait() -> bool:
        return watch.execute(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'eventsql.redriven_dead_letter'::regclass"
        ).fetchone() == (2,)

    with ThreadPoolExecutor(2) as executor:
        # Both have chosen what to redrive, and neither has noted it yet.
        overlapping = [LetterFilter(upto=5), LetterFilter(after=2)]
        both = [executor.submit(platform.dead_letters.redrive, "orders", wanted) for wanted in overlapping]
        until(both_wait)
        gate.rollback()
        assert sum(each.result() for each in both) == 7
    assert sorted(redriven_from(platform)) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("ending", "left"), [("commit", [1, 2, 4, 5, 6, 7]), ("rollback", [1, 2, 3, 4, 5, 6, 7])])
def test_a_letter_that_another_redrive_is_about_to_commit_is_waited_for(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, *, ending: str, left: list[int]
) -> None:
    other = sessions()
    other.execute("INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) VALUES ('orders_dlt', 3)")
    with ThreadPoolExecutor(1) as executor:
        ours = executor.submit(platform.dead_letters.redrive, "orders")
        until_blocked()
        getattr(other, ending)()
        assert ours.result() == len(left)
    assert redriven_from(platform) == left


def test_a_limit_is_met_although_another_redrive_took_some(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    other = sessions()
    other.execute(
        "INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) "
        "VALUES ('orders_dlt', 1), ('orders_dlt', 2)"
    )
    with ThreadPoolExecutor(1) as executor:
        ours = executor.submit(platform.dead_letters.redrive, "orders", limit=3)
        until_blocked()
        other.commit()
        assert ours.result() == 3
    assert redriven_from(platform) == [3, 4, 5]


@pytest.mark.parametrize("created_at", [None, "2025-01-01"], ids=["clock goes on", "clock went back"])
def test_letters_of_a_topic_that_was_made_anew_were_not_redriven(
    platform: EventSQL, letters: list[DeadLetter], created_at: str | None
) -> None:
    platform.dead_letters.redrive("orders")
    redriven(platform)
    platform.registry.unregister_topic("orders_dlt", force=True)
    platform.registry.register_topic(Topic("orders_dlt"))
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.topic SET eql_created_at = coalesce(%s, eql_created_at)", [created_at])
    give_up(platform)
    anew = platform.dead_letters.list("orders")
    assert ids_of(anew) == ids_of(letters)
    assert [letter.redriven_at for letter in anew] == [None] * 7
    assert platform.dead_letters.redrive("orders", limit=5) == 5
    assert platform.dead_letters.redrive("orders") == 2


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_letter_is_redriven_once_whatever_the_clock_does(platform: EventSQL, hours: int) -> None:
    platform.dead_letters.redrive("orders", LetterFilter(upto=4))
    with platform.database.connection() as connection:
        moved = (hours,)
        connection.execute("UPDATE eventsql.topic SET eql_created_at = now() + %s * interval '1 hour'", moved)
        connection.execute(
            "UPDATE eventsql.redriven_dead_letter SET eql_redriven_at = now() - %s * interval '2 hour'", moved
        )
    assert platform.dead_letters.prune() == 0
    assert ids_of(platform.dead_letters.list("orders", redriven=True)) == [1, 2, 3, 4]
    assert platform.dead_letters.plan_redrive("orders") == RedrivePlan(7, 4, 3)
    assert platform.dead_letters.redrive("orders") == 3
    assert platform.dead_letters.redrive("orders") == 0
    assert redriven_from(platform) == [1, 2, 3, 4, 5, 6, 7]


def test_a_letter_of_a_backfill_is_redriven_once_whatever_the_clock_does(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders_dlt", b"", metadata={"dlt_backfill": "one"}))
    platform.transfer.run_once()
    assert platform.dead_letters.of_backfills("orders") == {"one": 1}
    assert platform.dead_letters.redrive("orders", LetterFilter(backfill="one")) == 1
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.topic SET eql_created_at = now() + interval '1 hour'")
    assert platform.dead_letters.of_backfills("orders") == {}


def test_letters_of_a_topic_that_was_redefined_were_not_redriven(platform: EventSQL) -> None:
    platform.dead_letters.redrive("orders")
    redriven(platform)
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.orders_dlt_event")
    platform.registry.register_topic(Topic("orders_dlt", 2))
    give_up(platform)
    assert platform.dead_letters.redrive("orders") == 7


def test_letters_go_to_the_partition_of_their_key_in_a_topic_that_was_redefined(platform: EventSQL) -> None:
    for consumer in ("mailer", "audit"):
        platform.registry.unregister_consumer("orders", consumer)
    with platform.database.connection() as connection:
        connection.execute(f"DELETE FROM eventsql.{stored('orders')}")
    platform.registry.register_topic(Topic("orders", 5))
    assert platform.dead_letters.redrive("orders") == 7
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    assert [event.partition for event in events] == [partition_of_key(str(event.key), 5) for event in events]


def test_redrives_of_a_log_that_another_program_deleted_are_forgotten(platform: EventSQL) -> None:
    platform.dead_letters.redrive("orders")
    with platform.database.connection() as connection:
        # As EventSQL's Java library makes a topic anew, whose letters come later.
        connection.execute("DELETE FROM eventsql.orders_dlt_event WHERE eql_id > 2")
    assert platform.dead_letters.redrive("orders") == 2


def test_redrives_of_letters_that_retention_removed_are_forgotten(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments")).register_topic(Topic("payments_dlt"))
    platform.dead_letters.redrive("orders")
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) "
            "VALUES ('gone_dlt', 1), ('payments_dlt', 9)"
        )
        connection.execute("DELETE FROM eventsql.orders_dlt_event WHERE eql_id <= 3")
        assert platform.dead_letters.prune("orders") == 4, "three of its own, and one of a topic that was deleted"
        assert platform.dead_letters.prune() == 1
        assert platform.dead_letters.prune() == 0
        rows = connection.execute("SELECT eql_letter_id FROM eventsql.redriven_dead_letter ORDER BY 1").fetchall()
    assert rows == [(4,), (5,), (6,), (7,)]
    assert platform.dead_letters.redrive("orders") == 0


# Failing again


def test_an_event_that_fails_again_is_a_dead_letter_again_and_shows_all_its_way(
    platform: EventSQL, letters: list[DeadLetter]
) -> None:
    origin = letters[0].origin
    platform.dead_letters.redrive("orders", LetterFilter(ids=[1]))
    platform.transfer.run_once()
    give_up(platform)
    again = platform.dead_letters.list("orders", LetterFilter(after=7))[0]
    assert again.value == b"0"
    assert (again.metadata["redriven_from"], again.metadata["redriven_origin"]) == ("orders_dlt:1", origin)
    assert again.metadata["dlt_offset"] == "7"

    platform.dead_letters.redrive("orders", LetterFilter(ids=[again.id]))
    (second,) = redriven(platform)[1:]
    assert second.metadata == {
        "source": "web",
        "redriven_from": f"orders_dlt:{again.id}",
        "redriven_before": "orders_dlt:1",
        "redriven_consumer": "mailer",
        "redriven_origin": origin,
    }
    give_up(platform, "audit")
    last = platform.dead_letters.list("orders", LetterFilter(consumer="audit"))[-1]
    platform.dead_letters.redrive("orders", LetterFilter(ids=[last.id]))
    third = redriven(platform)[-1]
    assert third.metadata["redriven_before"] == f"orders_dlt:1 orders_dlt:{again.id}"
    assert (third.metadata["redriven_consumer"], third.metadata["redriven_origin"]) == ("audit", origin)


def test_the_way_of_an_event_that_is_redriven_for_ever_is_cut(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_values, "MAX_CHAIN", 2)
    for _ in range(4):
        letter = platform.dead_letters.list("orders", LetterFilter(key="k0", consumer="mailer"))[-1]
        platform.dead_letters.redrive("orders", LetterFilter(ids=[letter.id]))
        platform.transfer.run_once()
        give_up(platform)
    assert redriven(platform)[-1].metadata["redriven_before"] == "orders_dlt:8 orders_dlt:9"


# How it is found


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_batch_is_found_by_the_ids_of_its_letters_however_many_there_are(
    platform: EventSQL, *, analyzed: bool
) -> None:
    by_id = Queries("dead_letters", "eventsql")("by_id")
    matching = LogQueries("dead_letters", "eventsql")("matching", topic="orders_dlt").as_bytes()
    with platform.database.transaction() as connection:
        connection.execute(
            "INSERT INTO eventsql.orders_dlt_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            """SELECT -1, 'x', now(), '{"dlt_consumer": "mailer"}' FROM generate_series(1, 50000)"""
        )
        if analyzed:
            connection.execute("ANALYZE eventsql.orders_dlt_event")
        connection.execute("SET LOCAL jit TO on")
        connection.execute(by_id)
        assert connection.execute("SHOW jit").fetchone() == ("off",)
        values = {
            **LetterFilter(consumer="mailer").parameters(),
            "letters": "orders_dlt", "after": 20_000, "upto": 50_000, "limit": 1_000, "redriven": False,
            "erased": False,
        }  # fmt: skip
        for ids in (None, [30_000, 40_000]):
            plan = connection.execute(b"EXPLAIN " + matching, {**values, "ids": ids}, prepare=False).fetchall()
            text = "\n".join(line for (line,) in plan)
            assert re.search(r"Index Scan using orders_dlt_\w+_pkey on orders_dlt_", text), text
            assert "Seq Scan on orders_dlt" not in text
            assert "Sort" not in text, text


def write_letter(platform: EventSQL, *, metadata: str = "{}", time: str = "now") -> None:
    """Write a dead letter `odd` as another program may."""
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
            "VALUES ('orders_dlt', -1, 'odd', %s::json, %s::timestamptz)",
            [metadata, time],
        )
    platform.transfer.run_once()


@pytest.mark.parametrize("metadata", [r'{"dlt_consumer": "\ud800"}', r'{"note": "\u0000"}', "[1]", "null"])
def test_a_letter_that_another_program_wrote_holds_up_no_other(platform: EventSQL, metadata: str) -> None:
    write_letter(platform, metadata=metadata)
    assert [letter.value for letter in platform.dead_letters.list("orders", redriven=False)][-1] == b"odd"
    assert len(platform.dead_letters.list("orders", LetterFilter(consumer="mailer", exception="KeyError"))) == 3
    assert platform.dead_letters.of_backfills("orders") == {}
    assert platform.dead_letters.redrive("orders") == 8


@pytest.mark.parametrize("time", ["infinity", "-infinity"])
def test_a_letter_with_a_time_that_python_lacks_holds_up_no_other(platform: EventSQL, time: str) -> None:
    write_letter(platform, time=time)
    *_, odd = platform.dead_letters.list("orders")
    assert odd.buffered_at.year == {"infinity": 9999, "-infinity": 1}[time]
    assert platform.dead_letters.redrive("orders") == 8
    assert None not in [letter.redriven_at for letter in platform.dead_letters.list("orders")]
