"""Tasks share commits: each goes on after its own, in order; the loop never waits for the database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from eventsql_orchestration import AsyncPublisher, EventSQL, Placement, Publication, Topic
from eventsql_orchestration.errors import EventSQLError, PublisherClosedError
from eventsql_orchestration.publishing import async_publisher
from tests.forms import check_order
from tests.publishing.conftest import order, published
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Sessions, UntilBlocked
    from tests.publishing.conftest import Hold

NEVER = 3_600.0
PARTITIONS = 4


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS))


pytestmark = pytest.mark.prepared.with_args(prepare)


def log(platform: EventSQL) -> list[bytes]:
    platform.transfer.run_once()
    return [event.value for event in platform.reader.read("orders")]


async def settle() -> None:
    """Let every other task run until it waits for something outside of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_queued(publisher: AsyncPublisher, tasks: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while publisher._collectors.all()[0]._queued != tasks:  # noqa: ASYNC110 - it sets no event for a test
            await asyncio.sleep(0.001)
    await settle()


# Acknowledged after the commit


@pytest.mark.parametrize("form", ["blocks"], indirect=True)
@pytest.mark.usefixtures("form")
def test_a_task_gets_the_partition_and_the_offset_of_its_event(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("placed", PARTITIONS))

    async def play() -> list[Placement]:
        async with platform.async_publisher(max_age=NEVER, max_events=100, flushes=1) as publisher:
            publications = [Publication("placed", b"%d" % number, key=str(number)) for number in range(100)]
            return await asyncio.gather(*map(publisher.publish, publications))

    placements = asyncio.run(play())
    found = {event.value: event for event in platform.reader.read("placed")}
    assert placements == [(found[b"%d" % n].partition, found[b"%d" % n].id) for n in range(100)]


def test_enqueue_returns_before_the_commit_with_a_future_for_it(platform: EventSQL, hold: Hold) -> None:
    async def play() -> None:
        async with platform.async_publisher() as publisher:
            with hold():
                futures = [await publisher.enqueue(order(b"%d" % number, key="k")) for number in range(10)]
                assert not any(future.done() for future in futures)
            await asyncio.gather(*futures)
            assert published(platform) == [b"%d" % number for number in range(10)]

    asyncio.run(play())


def test_flush_waits_for_what_was_given_before(platform: EventSQL) -> None:
    async def play() -> None:
        async with platform.async_publisher(max_age=NEVER) as publisher:
            futures = [await publisher.enqueue(order(b"")) for _ in range(10)]
            await settle()
            assert not any(future.done() for future in futures)
            await publisher.flush()
            assert all(future.done() for future in futures)
            assert len(published(platform)) == 10

    asyncio.run(play())


def test_flush_waits_for_a_task_that_waits_for_room(platform: EventSQL, hold: Hold) -> None:
    async def play() -> None:
        async with platform.async_publisher(max_pending_events=1) as publisher:
            with hold():
                await publisher.enqueue(order(b"1"))
                waiting = asyncio.create_task(publisher.enqueue(order(b"2")))
                await until_queued(publisher, 1)
                flushing = asyncio.create_task(publisher.flush())
                await settle()
            await flushing
            assert (await waiting).done()

    asyncio.run(play())


def test_the_first_event_of_a_topic_does_not_keep_the_loop_from_running(platform: EventSQL, sessions: Sessions) -> None:
    async def play() -> None:
        session = sessions()
        session.execute("LOCK TABLE eventsql.topic IN ACCESS EXCLUSIVE MODE")
        async with platform.async_publisher() as publisher:
            platform.registry.forget("orders")
            publishing = asyncio.create_task(publisher.publish(order(b"")))
            await until_queued(publisher, 1)
            assert not publishing.done()
            session.rollback()
            await publishing

    asyncio.run(play())


# Order


@pytest.mark.parametrize(
    ("publication", "lanes"),
    [
        (lambda n: order(b"%d" % n, partition=n % PARTITIONS), PARTITIONS),
        (lambda n: order(b"%d" % n, key="one", partition=n % PARTITIONS), 1),
        (lambda n: Publication("payments", b"%d" % n, key=str(n % 7) if n % 2 else None), 1),
    ],
    ids=["of a partition without keys", "of a key in any partition", "of a topic without partitions"],
)
def test_events_keep_the_order_in_which_tasks_gave_them(
    platform: EventSQL, publication: Callable[[int], Publication], lanes: int
) -> None:
    platform.registry.register_topic(Topic("payments"))

    async def play() -> None:
        async with platform.async_publisher(max_events=5, flushes=3, max_pending_events=20) as publisher:
            await asyncio.gather(*(publisher.publish(publication(number)) for number in range(400)))

    asyncio.run(play())
    platform.transfer.run_once()
    log = [event for topic in ("orders", "payments") for event in platform.reader.read(topic)]
    for lane in range(lanes):
        check_order(
            [event for event in log if int(event.value) % lanes == lane], [str(n) for n in range(lane, 400, lanes)]
        )


def test_a_task_that_only_gives_events_lets_others_run(platform: EventSQL) -> None:
    async def play() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with platform.async_publisher(max_age=NEVER, max_events=10_000, max_pending_events=10_000) as publisher:
            await publisher.enqueue(order(b""))
            task = asyncio.create_task(other())
            for _ in range(5 * async_publisher.IN_A_ROW):
                await publisher.enqueue(order(b""))
            assert turns >= 5
            task.cancel()

    asyncio.run(play())


# Backpressure


@pytest.mark.parametrize("options", [{"max_pending_events": 2}, {"max_pending_bytes": 2}], ids=["events", "bytes"])
def test_tasks_wait_for_room_in_the_order_in_which_they_came(
    platform: EventSQL, hold: Hold, options: dict[str, Any]
) -> None:
    async def play() -> None:
        async with platform.async_publisher(max_age=0, **options) as publisher:
            with hold():
                for number in range(2):
                    await publisher.enqueue(order(b"%d" % number, partition=0))
                waiting = [
                    asyncio.create_task(publisher.publish(order(b"%d" % number, partition=0))) for number in range(2, 8)
                ]
                await until_queued(publisher, 6)
                assert publisher._collectors.all()[0]._lanes._pending_events == 2
                assert not any(task.done() for task in waiting)
            while publisher._collectors.all()[0]._queued == 6:  # noqa: ASYNC110 - it sets no event for a test
                await asyncio.sleep(0)
            # There is room for this one, and others were there before it.
            await publisher.publish(order(b"8", partition=0))
            await asyncio.gather(*waiting)

    asyncio.run(play())
    assert log(platform) == [b"%d" % number for number in range(9)]


def test_a_task_that_gives_up_waiting_for_room_publishes_nothing_and_holds_up_nobody(
    platform: EventSQL, hold: Hold
) -> None:
    async def play() -> None:
        async with platform.async_publisher(max_pending_events=1) as publisher:
            with hold():
                await publisher.enqueue(order(b"1", partition=0))
                for _ in range(2):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(publisher.publish(order(b"given up", partition=0)), 0.01)
                gone = asyncio.create_task(publisher.publish(order(b"given up", partition=0)))
                stays = asyncio.create_task(publisher.publish(order(b"2", partition=0)))
                await until_queued(publisher, 2)
                gone.cancel()
                await until_queued(publisher, 1)
            await stays
            assert gone.cancelled()

    asyncio.run(play())
    assert log(platform) == [b"1", b"2"]


# Cancelling


def test_an_event_whose_task_is_cancelled_is_still_published(
    platform: EventSQL, hold: Hold, until_blocked: UntilBlocked
) -> None:
    async def play() -> None:
        async with platform.async_publisher(max_age=0, flushes=1) as publisher:
            with hold():
                await publisher.enqueue(order(b"first", partition=0))
                await asyncio.to_thread(until_blocked)
                cancelled = asyncio.create_task(publisher.publish(order(b"cancelled", partition=0)))
                stays = asyncio.create_task(publisher.publish(order(b"stays", partition=0)))
                await settle()
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
            await stays

    asyncio.run(play())
    assert log(platform) == [b"first", b"cancelled", b"stays"]


# Closing


def test_closing_commits_what_was_given_and_what_waits_for_room(platform: EventSQL, hold: Hold) -> None:
    async def play() -> None:
        publisher = platform.async_publisher(max_pending_events=2)
        with hold():
            tasks = [asyncio.create_task(publisher.publish(order(b"%d" % n, partition=0))) for n in range(4)]
            await until_queued(publisher, 2)
            closing = asyncio.create_task(publisher.aclose())
            await settle()
            with pytest.raises(PublisherClosedError):
                await publisher.publish(order(b"late"))
            assert not closing.done()
        await closing
        await asyncio.gather(*tasks)
        await publisher.aclose()

    asyncio.run(play())
    assert log(platform) == [b"0", b"1", b"2", b"3"]


def test_an_event_that_closing_does_not_wait_for_hears_whether_its_outcome_is_known(
    platform: EventSQL, hold: Hold, until_blocked: UntilBlocked
) -> None:
    async def play() -> None:
        publisher = platform.async_publisher(max_age=0, flushes=1, max_pending_events=2)
        with hold():
            under_way = await publisher.enqueue(order(b"under way"))
            await asyncio.to_thread(until_blocked)
            waiting = await publisher.enqueue(order(b"waiting"))
            no_room = asyncio.create_task(publisher.publish(order(b"no room")))
            await until_queued(publisher, 1)
            await publisher.aclose(timeout=0.01)
            with pytest.raises(PublisherClosedError, match="not known"):
                await under_way
            with pytest.raises(PublisherClosedError, match="not published"):
                await waiting
            with pytest.raises(PublisherClosedError):
                await no_room
        thread = publisher._collectors.all()[0]._lanes._lanes[0].thread
        assert thread is not None
        await asyncio.to_thread(thread.join, PATIENCE)

    asyncio.run(play())
    assert log(platform) == [b"under way"]


def test_closing_the_platform_outside_of_the_loop_commits_what_its_publishers_were_given(
    dsn: str, platform: EventSQL
) -> None:
    publishing = EventSQL(dsn)

    async def play() -> None:
        publisher = publishing.async_publisher(max_age=NEVER)
        await publisher.enqueue(order(b"one"))
        # A publisher whose loop has ended still has its events committed.

    asyncio.run(play())
    publishing.close()
    assert platform.reader.count("orders") == 1


def test_a_publisher_belongs_to_one_loop(platform: EventSQL) -> None:
    # Threads whose start another test has interrupted stay.
    before = set(threading.enumerate())
    publisher = platform.async_publisher()

    async def play() -> None:
        await publisher.publish(order(b""))

    asyncio.run(play())
    with pytest.raises(EventSQLError, match="another event loop"):
        asyncio.run(play())
    publisher.close()
    assert not any(thread.name == "eventsql-flush" for thread in set(threading.enumerate()) - before)
