"""The trigger: its claims, how it hands them over, and claims that no task takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.shared_stream import AdvanceItem, AdvanceOutcome

from eventsql_orchestration import Claim, Consumer, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.airflow import EventSQLHook, EventSQLTrigger
from eventsql_orchestration.airflow.claim_producer import ClaimEvent, ClaimProducer
from eventsql_orchestration.airflow.triggers import EventSQLConditionTrigger
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.orchestration.owners import AIRFLOW_TRIGGER
from tests.waiting import PATIENCE, wait_until

STORED = AdvanceOutcome(acked=1, failed=0)
NOT_STORED = AdvanceOutcome(acked=0, failed=1)


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    connected.registry.register_topic(Topic("rides", partitions=2))
    connected.registry.register_consumer(Consumer("rides", "billing", partitioned=True))
    return connected


def publish(platform: EventSQL, *partitions: int) -> None:
    platform.publisher.publish_all(Publication("rides", b"1", partition=each) for each in partitions)
    platform.transfer.run_once()


def trigger(**options: Any) -> EventSQLTrigger:
    return EventSQLTrigger(topic="rides", consumer="billing", max_wait=0.0, poll_interval=0.05, **options)


def with_producer(test: Callable[[ClaimProducer, Any], Any], **options: Any) -> Any:
    """Run a coroutine function with a producer and its stream."""

    async def run() -> Any:
        made = trigger(**options)
        made._open_hook = _open  # type: ignore[method-assign]  # no supervisor gives connections here
        producer = made.producer()
        stream = producer.open_stream()
        try:
            return await test(producer, stream)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    return asyncio.run(run())


async def _open() -> EventSQLHook:
    return EventSQLHook()


def test_each_partition_with_events_is_claimed_once(rides: EventSQL) -> None:
    publish(rides, 0, 0, 1)

    async def test(producer: ClaimProducer, stream: Any) -> Any:
        made = [await anext(stream) for _ in range(2)]
        assert len({producer.get_advance_lane(claim) for _, claim in made}) == 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        return [payload for payload, _ in made]

    payloads = with_producer(test)
    assert sorted((each["partition"], each["events"]) for each in payloads) == [(0, 2), (1, 1)]
    for each in payloads:
        claim, state = rides.claims.get(each["claim"])
        assert (state, claim.owner) == ("claimed", AIRFLOW_TRIGGER)
        assert ClaimEvent(**each).names(claim)


def test_a_stored_claim_waits_for_its_task_and_another_is_released(rides: EventSQL) -> None:
    publish(rides, 0, 1)

    async def test(producer: ClaimProducer, stream: Any) -> tuple[Claim, Claim]:
        (_, kept), (_, given_up) = [await anext(stream) for _ in range(2)]
        await producer.advance([AdvanceItem(kept, STORED)])
        await producer.advance([AdvanceItem(given_up, NOT_STORED)])
        return kept, given_up

    kept, given_up = with_producer(test)
    leases = {state.partition: state for state in rides.registry.consumer("rides", "billing")}
    expires = leases[kept.range.partition].lease_expires_at
    assert expires is not None
    assert leases[kept.range.partition].lease_owner == AIRFLOW_TRIGGER
    with rides.database.transaction() as connection:
        row = connection.execute("SELECT %s - now() BETWEEN interval '1 s' AND interval '1 min'", [expires]).fetchone()
    assert row == (True,)
    assert rides.claims.get(given_up.id)[1] == "released"


def test_events_of_a_claim_that_nobody_took_are_claimed_again(rides: EventSQL) -> None:
    publish(rides, 0)
    lost = rides.claims.claim("rides", "billing", 0, owner=AIRFLOW_TRIGGER, max_wait=0.0, lease=0.001)
    assert isinstance(lost, Claim)

    async def test(_: ClaimProducer, stream: Any) -> Any:
        return (await anext(stream))[1]

    again = with_producer(test)
    assert again.range == lost.range
    assert rides.claims.get(lost.id)[1] == "released"


def test_the_lease_doubles_while_no_task_takes_the_events_over(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[float] = []
    renew = Claims.renew

    def renewed(claims: Claims, claim: Claim, *, lease: float) -> None:
        leases.append(lease)
        renew(claims, claim, lease=0.001)

    monkeypatch.setattr(Claims, "renew", renewed)
    publish(rides, 0)

    async def test(producer: ClaimProducer, stream: Any) -> None:
        for _ in range(4):
            _, claim = await anext(stream)
            await producer.advance([AdvanceItem(claim, STORED)])
        _, claim = await anext(stream)
        rides.claims.release(claim)
        with rides.database.transaction() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s", [claim.range.upto])
        await asyncio.to_thread(publish, rides, 0)
        _, claim = await anext(stream)
        await producer.advance([AdvanceItem(claim, STORED)])

    with_producer(test, start_timeout=150.0)
    assert leases == [60.0, 120.0, 150.0, 150.0, 60.0]


def test_a_task_that_is_faster_than_the_confirmation_keeps_its_claim(rides: EventSQL) -> None:
    publish(rides, 0)

    async def test(producer: ClaimProducer, stream: Any) -> Claim:
        _, claim = await anext(stream)
        adopted = rides.claims.adopt(claim.id, owner="airflow dag/run")
        await producer.advance([AdvanceItem(claim, STORED)])
        await producer.advance([AdvanceItem(claim, NOT_STORED)])
        return adopted

    adopted = with_producer(test)
    rides.claims.renew(adopted)


def test_events_that_come_later_are_claimed_without_a_restart(rides: EventSQL) -> None:
    async def test(_: ClaimProducer, stream: Any) -> Any:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(publish, rides, 1)
        return (await waiting)[0]

    assert with_producer(test)["partition"] == 1


def test_a_partition_that_the_topic_loses_delays_no_claim(rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.airflow.claim_producer.FIRST_BACKOFF", 600.0)
    rides.repartitioner.repartition("rides", 1)

    async def test(_: ClaimProducer, stream: Any) -> Any:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wait_until, lambda: len(rides.registry.consumer("rides", "billing")) == 1)
        await asyncio.to_thread(publish, rides, 0)
        return (await asyncio.wait_for(waiting, PATIENCE))[0]

    assert with_producer(test)["partition"] == 0


def test_a_consumer_that_does_not_exist_yet_is_waited_for(connected: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.airflow.claim_producer.FIRST_BACKOFF", 0.05)

    async def test(_: ClaimProducer, stream: Any) -> Any:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        connected.registry.register_topic(Topic("rides"))
        connected.registry.register_consumer(Consumer("rides", "billing"))
        await asyncio.to_thread(connected.publisher.publish, Publication("rides", b"1"))
        await asyncio.to_thread(connected.transfer.run_once)
        return (await waiting)[0]

    assert with_producer(test)["partition"] == -1


class Down:
    """A shard whose every use waits, and then finds it down."""

    name = "down"
    database = "postgresql://down"

    def __init__(self, go_on: threading.Event) -> None:
        self.go_on = go_on

    def __getattr__(self, _: str) -> Any:
        self.go_on.wait(PATIENCE)
        raise DatabaseUnavailableError("it is down")


def test_a_shard_that_is_down_delays_no_other(rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(EventSQLHook, "shards", property(lambda hook: (Down(go_on), *hook.platform.shards)))
    publish(rides, 0)

    async def test(producer: ClaimProducer, stream: Any) -> None:
        _, claim = await anext(stream)
        # The other shard's claims wait in its thread, which does not come back.
        await producer.advance([AdvanceItem(replace(claim, shard="down"), STORED)])
        await producer.advance([AdvanceItem(claim, STORED)])
        assert rides.registry.consumer("rides", "billing")[0].lease_owner == AIRFLOW_TRIGGER
        await asyncio.to_thread(publish, rides, 1)
        _, other = await anext(stream)
        assert other.range.partition == 1
        go_on.set()

    try:
        with_producer(test)
    finally:
        go_on.set()


def test_a_shard_that_fails_is_tried_again_while_others_are_claimed(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.airflow.claim_producer.FIRST_BACKOFF", 0.01)
    tries = threading.Semaphore(0)

    class Counted(Down):
        def __getattr__(self, name: str) -> Any:
            tries.release()
            return super().__getattr__(name)

    down = threading.Event()
    down.set()
    monkeypatch.setattr(EventSQLHook, "shards", property(lambda hook: (Counted(down), *hook.platform.shards)))

    async def test(_: ClaimProducer, stream: Any) -> None:
        waiting = asyncio.ensure_future(anext(stream))
        for _tried in range(3):
            assert await asyncio.to_thread(tries.acquire, timeout=PATIENCE)
        await asyncio.to_thread(publish, rides, 1)
        _, claim = await waiting
        assert claim.range.partition == 1

    with_producer(test)


def test_an_error_that_is_no_database_error_ends_the_stream(rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(ClaimProducer, "_look", broken)

    async def test(_: ClaimProducer, stream: Any) -> None:
        with pytest.raises(RuntimeError, match="broken"):
            await anext(stream)

    with_producer(test)


def test_a_connection_that_airflow_does_not_give_yet_is_waited_for(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.airflow.claim_producer.FIRST_BACKOFF", 0.05)
    publish(rides, 1)
    asked = []

    async def given(_: str) -> Any:
        asked.append(True)
        if len(asked) < 3:
            raise AirflowNotFoundException("no connection")
        return EventSQLHook().connection

    monkeypatch.setattr("airflow.sdk.BaseHook.aget_connection", given)

    async def test() -> Any:
        stream = trigger().producer().open_stream()
        try:
            return (await anext(stream))[0]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    assert asyncio.run(test())["partition"] == 1


def test_a_thread_that_outlives_its_stream_leaves_nothing_open(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = threading.Event(), threading.Event()

    def look(producer: ClaimProducer, shard: Shard) -> list[Claim]:
        looking.set()
        assert go_on.wait(PATIENCE)
        shard.registry.topics()
        return []

    monkeypatch.setattr(ClaimProducer, "_look", look)

    async def test(producer: ClaimProducer, stream: Any) -> None:
        waiting = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(looking.wait, PATIENCE)
        hook = producer._hook
        assert hook is not None
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert go_on.is_set()
        assert hook._platform is None
        assert producer._lanes == []

    with_producer(test)


def test_a_waiting_trigger_connects_outside_the_loop(rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Watching(EventSQLHook):
        @property
        def shards(self) -> tuple[Shard, ...]:
            threads.append(threading.current_thread())
            return super().shards

    async def opened(_: str) -> EventSQLHook:
        return Watching()

    monkeypatch.setattr("eventsql_orchestration.airflow.triggers.open_hook", opened)
    wanted = {"topic": "rides", "consumer": "billing", "kind": "max_lag", "number": 0}

    async def test() -> Any:
        trigger = EventSQLConditionTrigger(condition=wanted, eventsql_conn_id="c", poll_interval=0.05)
        return [event.payload async for event in trigger.run()]

    assert asyncio.run(test()) == [{"holds": True, "value": 0}]
    assert threads
    assert threading.main_thread() not in threads


def test_a_waiting_trigger_keeps_no_connection_between_two_looks(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, left_open = EventSQLHook(), []

    async def opened(_: str) -> EventSQLHook:
        return hook

    async def asleep(_: float) -> None:
        left_open.append(hook._platform)
        if len(left_open) == 2:
            publish(rides, 0)

    monkeypatch.setattr("eventsql_orchestration.airflow.triggers.open_hook", opened)
    monkeypatch.setattr(asyncio, "sleep", asleep)
    wanted = {"topic": "rides", "consumer": "billing", "kind": "events", "number": 1}

    async def test() -> Any:
        trigger = EventSQLConditionTrigger(condition=wanted, eventsql_conn_id="c", poll_interval=60.0)
        return [event.payload async for event in trigger.run()]

    assert asyncio.run(test()) == [{"holds": True, "value": 1}]
    assert left_open == [None, None]


def test_a_waiting_trigger_ends_when_its_topic_is_gone(connected: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(_: str) -> EventSQLHook:
        return EventSQLHook()

    monkeypatch.setattr("eventsql_orchestration.airflow.triggers.open_hook", opened)
    wanted = {"topic": "rides", "consumer": None, "kind": "offset", "number": 1}

    async def test() -> Any:
        trigger = EventSQLConditionTrigger(condition=wanted, eventsql_conn_id="c", poll_interval=60.0)
        return await asyncio.wait_for(anext(trigger.run()), 30)

    with pytest.raises(TopicNotFoundError):
        asyncio.run(test())


def test_airflows_message_queue_trigger_is_this_trigger() -> None:
    found = MessageQueueTrigger(scheme="eventsql", topic="rides", consumer="billing", max_events=5)
    assert found.serialize() == EventSQLTrigger(topic="rides", consumer="billing", max_events=5).serialize()


def test_a_trigger_is_made_again_from_its_arguments_and_shares_its_stream() -> None:
    path, arguments = trigger().serialize()
    assert path == "eventsql_orchestration.airflow.triggers.EventSQLTrigger"
    again = EventSQLTrigger(**arguments)
    assert again.serialize() == (path, arguments)
    assert again.shared_stream_key() == trigger().shared_stream_key() != trigger(max_events=5).shared_stream_key()


def test_payloads_of_other_triggers_are_no_claims() -> None:
    assert ClaimEvent.read("x") is None
    assert ClaimEvent.read({"message": "x"}) is None


@pytest.mark.parametrize("wrong", [{"topic": "no topic"}, {"consumer": ""}, {"start_timeout": 0}, {"max_events": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EventSQLTrigger(**{"topic": "rides", "consumer": "billing", **wrong})


def test_a_connection_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", "postgres://host/db")
    with pytest.raises(ConfigurationError, match="make one of the type 'eventsql'"):
        EventSQLHook().platform  # noqa: B018 - the use connects
