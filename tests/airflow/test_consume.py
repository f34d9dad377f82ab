"""Tasks that consume: claims taken over and made, effects once, dead letters, retries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import count
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from eventsql_orchestration import Claim, Connection, Consumer, Event, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.airflow import EventSQLConsumeOperator, EventSQLHook, RunLimits, publish_output, topic_asset
from eventsql_orchestration.airflow.claim_producer import ClaimEvent
from eventsql_orchestration.airflow.local import connection_of
from eventsql_orchestration.errors import ConsumerNotFoundError, DatabaseUnavailableError, ValidationError
from eventsql_orchestration.orchestration import publication
from eventsql_orchestration.orchestration.owners import AIRFLOW_TRIGGER
from eventsql_orchestration.orchestration.publication import Published
from tests.airflow.conftest import context_of
from tests.airflow.consuming import QUICK, effects, operator
from tests.effects import make_table, write
from tests.shards.conftest import Databases, databases

__all__ = ["databases"]

RIDES = Topic("rides", partitions=4)
CONSUMER = Consumer("rides", "billing", partitioned=True)


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    connected.registry.register_topic(RIDES)
    connected.registry.register_consumer(CONSUMER)
    make_table(connected)
    return connected


def publish(platform: EventSQL, count: int, partition: int = 0) -> None:
    platform.publisher.publish_all(Publication("rides", b"%d" % n, partition=partition) for n in range(count))
    platform.transfer.run_once()


def logged(platform: EventSQL) -> list[int]:
    return [event.id for batch in platform.reader.stream("rides") for event in batch]


def claimed(platform: EventSQL, *, owner: str = AIRFLOW_TRIGGER, partition: int = 0, **options: Any) -> Claim:
    found = platform.claims.claim("rides", "billing", partition, owner=owner, max_wait=0.0, **options)
    assert isinstance(found, Claim)
    return found


def payload(claim: Claim) -> dict[str, Any]:
    return asdict(ClaimEvent.of(claim))


def test_a_task_takes_the_claim_over_that_triggered_its_run(rides: EventSQL) -> None:
    publish(rides, 5)
    claim = claimed(rides)
    result = operator().execute(context_of(payloads=[payload(claim)]))
    assert effects(rides) == logged(rides)
    assert (result["events"], result["ranges"][0]["claim"]) == (5, claim.id)
    assert rides.claims.get(claim.id)[1] == "committed"


def claims_seen(seen: list[int]) -> Any:
    """A function over claims that commits each."""

    def consume(claim: Claim, eventsql: EventSQLHook) -> None:
        seen.append(claim.id)
        with eventsql.platform.database.transaction() as connection:
            eventsql.platform.claims.commit(connection, claim)

    return consume


def test_a_run_consumes_the_claims_whose_asset_events_have_no_run(rides: EventSQL) -> None:
    """Airflow makes one run for two asset events in short order, and that run has only the first."""
    publish(rides, 3, 0)
    publish(rides, 3, 1)
    first, _ = [claimed(rides, partition=partition) for partition in (0, 1)]
    result = operator().execute(context_of(payloads=[payload(first)]))
    assert (result["events"], effects(rides)) == (6, logged(rides))


def test_a_run_leaves_claims_alone_that_have_runs_of_their_own(rides: EventSQL) -> None:
    """Claims made after the run, claims that another task took meanwhile, and all others if `claims` names some."""
    for partition in range(3):
        publish(rides, 2, partition)
    mine, left, taken = [claimed(rides, partition=partition) for partition in range(3)]
    seen: list[int] = []
    consume = claims_seen(seen)
    later: list[Claim] = []

    def meanwhile(claim: Claim, eventsql: EventSQLHook) -> None:
        if not later:
            rides.claims.adopt(taken.id, owner="airflow dag/another")
            publish(rides, 2, 3)
            later.append(claimed(rides, partition=3))
        consume(claim, eventsql)

    named = operator(consume, gets="claim", claims=[payload(mine)])
    named.execute(context_of())
    assert seen == [mine.id]
    publish(rides, 2, 0)
    triggered = claimed(rides)
    operator(meanwhile, gets="claim").execute(context_of(payloads=[payload(triggered)]))
    assert seen == [mine.id, triggered.id, left.id]
    owners = {claim.id: rides.claims.get(claim.id)[0].owner for claim in (taken, *later)}
    assert owners == {taken.id: "airflow dag/another", later[0].id: AIRFLOW_TRIGGER}


def test_a_retry_tells_of_an_event_that_failed_in_a_claim_without_a_run(rides: EventSQL) -> None:
    publish(rides, 1, 0)
    publish(rides, 1, 1)
    first, _ = [claimed(rides, partition=partition) for partition in (0, 1)]

    def refusing(events: Sequence[Event], connection: Connection) -> None:
        if events[0].partition == 1:
            raise ValueError("no")
        write(events, connection)

    with pytest.raises(AirflowException, match="failed, attempt 1"):
        operator(refusing).execute(context_of(payloads=[payload(first)]))
    with pytest.raises(AirflowException, match="nothing was consumed"):
        operator(refusing).execute(context_of(payloads=[payload(first)], try_number=2))


def test_a_retry_leaves_the_events_of_a_partition_alone_that_another_run_had_last(rides: EventSQL) -> None:
    publish(rides, 1, 0)
    publish(rides, 1, 1)
    mine, other = [claimed(rides, partition=partition) for partition in (0, 1)]
    operator(claims=[payload(other)]).execute(context_of(run_id="other"))
    publish(rides, 1, 1)
    operator().execute(context_of(payloads=[payload(mine)], try_number=2))
    assert effects(rides) == logged(rides)[:2]


def test_the_second_run_for_a_claim_consumes_nothing(rides: EventSQL) -> None:
    publish(rides, 3)
    context = context_of(payloads=[payload(claimed(rides))])
    operator().execute(context)
    with pytest.raises(AirflowSkipException):
        operator().execute(context)
    assert effects(rides) == logged(rides)


@pytest.mark.parametrize("by", ["a claim", "named claims", "hand"])
def test_a_retry_after_the_last_commit_succeeds_with_what_the_try_before_consumed(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The tasks after a skipped one would be skipped, too, though the events are consumed."""
    publish(rides, 3)
    claim = claimed(rides) if by != "hand" else None
    payloads = [] if claim is None else [payload(claim)]
    named = {"claims": payloads} if by == "named claims" else {}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(EventSQLConsumeOperator, "_report", killed)
        operator(**named).execute(context_of(payloads=payloads))
    result = operator(**named).execute(context_of(payloads=payloads, try_number=2))
    assert (result["events"], [each["upto"] for each in result["ranges"]]) == (3, [logged(rides)[-1]])
    with pytest.raises(AirflowSkipException):
        operator(**named).execute(context_of(payloads=payloads, try_number=2, run_id="other"))
    assert effects(rides) == logged(rides)


def test_a_task_whose_claims_are_none_consumes_nothing(rides: EventSQL) -> None:
    publish(rides, 3)
    with pytest.raises(AirflowSkipException):
        operator(claims=[]).execute(context_of())
    assert effects(rides) == []


def test_a_late_run_takes_over_the_newer_claim_of_the_trigger(rides: EventSQL) -> None:
    publish(rides, 3)
    late = claimed(rides)
    with rides.database.transaction() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s'")
    newer = claimed(rides)
    assert newer.id != late.id
    assert operator().execute(context_of(payloads=[payload(late)]))["ranges"][0]["claim"] == newer.id
    with pytest.raises(AirflowSkipException):
        operator().execute(context_of(payloads=[payload(newer)], run_id="other"))
    assert effects(rides) == logged(rides)


def test_a_late_run_for_a_partition_that_the_topic_has_lost_consumes_nothing(rides: EventSQL) -> None:
    publish(rides, 1, 3)
    late = payload(claimed(rides, partition=3))
    operator().execute(context_of(payloads=[late]))
    rides.repartitioner.repartition("rides", 2)
    with pytest.raises(AirflowSkipException):
        operator().execute(context_of())
    assert len(rides.registry.consumer("rides", "billing")) == 2
    with pytest.raises(AirflowSkipException):
        operator().execute(context_of(payloads=[late], run_id="late"))
    with pytest.raises(ConsumerNotFoundError):
        operator(partition=3).execute(context_of())


def test_a_run_by_hand_claims_what_waits_in_every_partition(rides: EventSQL) -> None:
    publish(rides, 2, 0)
    publish(rides, 2, 1)
    assert operator().execute(context_of())["events"] == 4
    assert effects(rides) == logged(rides)


def test_the_asset_of_a_topic_says_what_was_published_to_it_and_from_where(rides: EventSQL) -> None:
    rides.registry.register_topic(Topic("sums"))
    publish(rides, 3)

    def sum_up(claim: Claim, eventsql: EventSQLHook, context: Any) -> Any:
        return publish_output(context, [Publication("sums", b"3")], topic="sums", eventsql=eventsql, claim=claim)

    sums, other = topic_asset("sums"), topic_asset("other")
    task = operator(sum_up, gets="claim", outlets=[sums, other])
    assert [asset.uri for asset in task.inlets] == ["eventsql://eventsql_default/rides"]
    outlets = {asset: SimpleNamespace(extra={}) for asset in (sums, other)}
    context = context_of()
    context["outlet_events"] = outlets
    result = task.execute(context)
    assert outlets[sums].extra["consumed"] == outlets[other].extra["consumed"] == result
    said = {name: outlets[sums].extra[name] for name in ("topic", "events", "ranges", "repeated")}
    assert said == {"topic": "sums", "events": 1, "ranges": [{"first": 1, "last": 1}], "repeated": False}
    assert "topic" not in outlets[other].extra


def test_a_mapping_that_names_a_topic_and_no_publication_fails_no_committed_range(rides: EventSQL) -> None:
    publish(rides, 3)

    def look(claim: Claim, eventsql: EventSQLHook) -> Any:
        shard = eventsql.shard(claim.shard)
        with shard.database.transaction() as connection:
            shard.claims.check(connection, claim)
            shard.claims.commit(connection, claim)
        return {"topic": "sums", "ranges": 1}

    sums = topic_asset("sums")
    context: Any = {**context_of(), "outlet_events": {sums: SimpleNamespace(extra={})}}
    result = operator(look, gets="claim", outlets=[sums]).execute(context)
    assert context["outlet_events"][sums].extra == {"consumed": result}


@pytest.mark.parametrize("unknown", [0, 1], ids=["first", "last"])
def test_the_asset_of_a_topic_names_the_ranges_of_all_publications_or_none(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch, unknown: int
) -> None:
    rides.registry.register_topic(Topic("sums"))
    for partition in (0, 1):
        publish(rides, 3, partition)
    with_offsets, published = publication._Record._with_offsets, count()

    def not_in_time(record: Any, found: Published, at: datetime) -> Published:
        # As if the transfer had not moved these events in time.
        return found if next(published) == unknown else with_offsets(record, found, at)

    def sum_up(claim: Claim, eventsql: EventSQLHook, context: Any) -> Any:
        return publish_output(context, [Publication("sums", b"3")], topic="sums", eventsql=eventsql, claim=claim)

    monkeypatch.setattr(publication._Record, "_with_offsets", not_in_time)
    sums = topic_asset("sums")
    context: Any = {**context_of(), "outlet_events": {sums: SimpleNamespace(extra={})}}
    operator(sum_up, gets="claim", outlets=[sums]).execute(context)
    said = context["outlet_events"][sums].extra
    assert (said["events"], "ranges" in said) == (2, False)


def test_a_task_leaves_the_claim_of_another_task_alone(rides: EventSQL) -> None:
    for partition in (0, 1):
        publish(rides, 2, partition)
        claimed(rides, partition=partition, owner="airflow dag/another")
    with pytest.raises(AirflowSkipException, match=r"topic rides\[0\]: .*leases the partition.*; topic rides\[1\]: "):
        operator().execute(context_of())
    assert effects(rides) == []


@pytest.mark.parametrize("second", ["second", "first"], ids=["another run", "another task of the run"])
def test_a_claim_stays_with_the_task_that_has_taken_it_over(rides: EventSQL, second: str) -> None:
    publish(rides, 4)
    claim = claimed(rides)

    class Beside(EventSQLConsumeOperator):
        def _calls(self, *given: Any) -> Any:
            consume = super()._calls(*given)

            def after_a_second_run(held: Claim) -> Any:
                with pytest.raises(AirflowSkipException, match="leases the partition"):
                    operator().execute(context_of(run_id=second, payloads=[payload(claim)]))
                return consume(held)

            return after_a_second_run

    first = Beside(task_id="consume", topic="rides", consumer="billing", limits=QUICK, python_callable=write)
    assert first.execute(context_of(run_id="first"))["events"] == 4
    assert effects(rides) == logged(rides)


@pytest.mark.parametrize("in_", ["its claim", "a further range", "a claim without a run", "a run by hand"])
def test_a_retry_goes_on_where_the_first_try_died(rides: EventSQL, in_: str) -> None:
    publish(rides, 6)
    payloads = []
    if in_ == "a claim without a run":
        publish(rides, 1, 1)
        payloads = [payload(claimed(rides, partition=1))]
        claimed(rides)
    elif in_ != "a run by hand":
        payloads = [payload(claimed(rides, max_events=6 if in_ == "its claim" else 2))]
    batches = []

    def dying(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if events[0].partition == 0:
            batches.append(events)
        if len(batches) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operator(dying).execute(context_of(payloads=payloads))
    assert len(batches) == 2
    operator().execute(context_of(payloads=payloads, try_number=2))
    assert effects(rides) == logged(rides)


def test_a_failing_event_fails_the_task_and_keeps_the_events_before_it(rides: EventSQL) -> None:
    publish(rides, 4)
    bad = logged(rides)[2]

    def refusing(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if any(event.id == bad for event in events):
            raise ValueError("no")

    with pytest.raises(AirflowException, match=f"event {bad} of topic rides failed, attempt 1"):
        operator(refusing).execute(context_of(payloads=[payload(claimed(rides))]))
    assert effects(rides) == logged(rides)[:2]
    with rides.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() + interval '1 hour'")
    with pytest.raises(AirflowException, match="is retried in"):
        operator(refusing).execute(context_of(try_number=2))


def test_an_event_without_attempts_left_is_not_said_to_be_retried(rides: EventSQL) -> None:
    rides.registry.declare_consumer(CONSUMER, max_attempts=1)
    publish(rides, 1)

    def refusing(_events: Sequence[Event], _connection: Connection) -> None:
        raise ValueError("no")

    with pytest.raises(AirflowException) as failed:
        operator(refusing).execute(context_of(payloads=[payload(claimed(rides))]))
    assert "the partition is blocked" in str(failed.value)
    assert "is retried" not in str(failed.value)


def test_an_event_that_keeps_failing_becomes_a_dead_letter_and_the_task_succeeds(rides: EventSQL) -> None:
    rides.registry.register_topic(Topic("rides_dlt"))
    rides.registry.declare_consumer(CONSUMER, max_attempts=1)
    publish(rides, 3)
    bad = logged(rides)[1]

    def refusing(events: Sequence[Event], connection: Connection) -> None:
        if any(event.id == bad for event in events):
            raise ValueError("no")
        write(events, connection)

    result = operator(refusing).execute(context_of(payloads=[payload(claimed(rides))]))
    assert result["dead_letters"] == [bad]
    assert effects(rides) == [each for each in logged(rides) if each != bad]


@pytest.mark.parametrize("by", ["claims", "hand"])
def test_an_event_that_fails_delays_no_other_partition(rides: EventSQL, by: str) -> None:
    publish(rides, 2, 0)
    publish(rides, 2, 1)
    payloads = [payload(claimed(rides, partition=partition)) for partition in (0, 1)] if by == "claims" else []

    def refusing(events: Sequence[Event], connection: Connection) -> None:
        if events[0].partition == 0:
            raise ValueError("no")
        write(events, connection)

    with pytest.raises(AirflowException, match=f"event {logged(rides)[0]} of topic rides failed"):
        operator(refusing).execute(context_of(payloads=payloads))
    assert effects(rides) == logged(rides)[2:]


def test_a_range_that_fails_delays_no_other_partition(rides: EventSQL) -> None:
    publish(rides, 2, 0)
    publish(rides, 2, 1)
    claims = [claimed(rides, partition=partition) for partition in (0, 1)]
    consume = claims_seen([])

    def refusing(claim: Claim, eventsql: EventSQLHook) -> None:
        if claim.range.partition == 0:
            raise ValueError("no")
        consume(claim, eventsql)

    with pytest.raises(AirflowFailException, match="failed and was released"):
        operator(refusing, gets="claim").execute(context_of(payloads=[payload(claim) for claim in claims]))
    assert [rides.claims.get(claim.id)[1] for claim in claims] == ["released", "committed"]


def test_a_shard_that_is_down_fails_the_task_after_the_claims_of_the_others(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(rides, 3)
    asked: list[str | None] = []
    find = EventSQLHook.shard

    def shard(hook: EventSQLHook, name: str | None) -> Any:
        asked.append(name)
        if name == "down":
            raise DatabaseUnavailableError("it is down")
        return find(hook, name)

    monkeypatch.setattr(EventSQLHook, "shard", shard)
    here = payload(claimed(rides, max_events=2))
    with pytest.raises(DatabaseUnavailableError):
        operator().execute(context_of(payloads=[{**here, "shard": "down"}, {**here, "shard": "down"}, here]))
    assert asked == ["down", None]
    assert effects(rides) == logged(rides)


@pytest.fixture
def shards(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventSQL]:
    """Two shards with events of `rides`, to which Airflow's default connection leads."""
    dsns = databases(2)
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", connection_of(dsns, "eventsql"))
    with EventSQL(*dsns, transfer=False) as platform:
        platform.registry.register_topic(Topic("rides")).register_consumer(Consumer("rides", "billing"))
        platform.publisher.publish_all(Publication("rides", b"", key=str(number)) for number in range(20))
        platform.transfer.run_once()
        yield platform


def take(_events: Sequence[Event], _connection: Connection) -> None:
    """Consume without an effect."""


@pytest.fixture
def up(shards: EventSQL, monkeypatch: pytest.MonkeyPatch) -> Shard:
    """One of the two shards. Airflow cannot reach the other."""
    given = connection_of([shards.shards[0].database.dsn, "postgresql://127.0.0.1:1/away"], "eventsql")
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", given)
    return shards.shards[0]


def test_a_run_for_a_claim_succeeds_though_another_shard_is_down(up: Shard) -> None:
    claim = up.claims.claim("rides", "billing", owner=AIRFLOW_TRIGGER, max_wait=0.0)
    assert isinstance(claim, Claim)
    result = operator(take).execute(context_of(payloads=[{**payload(claim), "shard": up.name}]))
    assert [(each["shard"], each["claim"]) for each in result["ranges"]] == [(up.name, claim.id)]


def test_a_run_by_hand_consumes_on_the_shard_that_is_up(up: Shard) -> None:
    result = operator(take).execute(context_of())
    assert [(each["shard"], each["upto"]) for each in result["ranges"]] == [(up.name, up.reader.end("rides"))]
    with pytest.raises(AirflowSkipException, match=r"events are left on .*, which cannot be reached"):
        operator(take).execute(context_of(run_id="other"))


def test_a_retry_tells_the_claims_of_two_shards_apart(shards: EventSQL) -> None:
    claims = []
    for shard in shards.shards:
        claim = shard.claims.claim("rides", "billing", owner=AIRFLOW_TRIGGER, max_wait=0.0)
        assert isinstance(claim, Claim)
        claims.append({**payload(claim), "shard": shard.name})
    first, second = claims
    assert first["claim"] == second["claim"]

    def consumed(*given: dict[str, Any], try_number: int) -> list[str]:
        result = operator(take, claims=list(given)).execute(context_of(try_number=try_number))
        return [each["shard"] for each in result["ranges"]]

    assert consumed(second, try_number=1) == [second["shard"]]
    assert consumed(first, second, try_number=2) == [second["shard"], first["shard"]]
    assert consumed(second, try_number=2) == [second["shard"]]


def test_the_first_range_of_each_partition_comes_before_further_ranges(rides: EventSQL) -> None:
    publish(rides, 1, 0)
    publish(rides, 1, 1)
    claims = [claimed(rides, partition=partition) for partition in (0, 1)]
    partitions: list[int] = []

    def busy(events: Sequence[Event], connection: Connection) -> None:
        partitions.append(events[0].partition)
        if len(partitions) <= 2:
            for _ in range(2):
                publish(rides, 1, events[0].partition)

    limits = RunLimits(max_wait=0.0, drain_idle=0.0, max_events=1)
    operator(busy, limits=limits).execute(context_of(payloads=[payload(claim) for claim in claims]))
    assert partitions == [0, 1, 0, 1, 0, 1]


def losing(platform: EventSQL, function: Any, *, nth: int, limits: RunLimits = QUICK) -> EventSQLConsumeOperator:
    """A task whose claim of this number, counted from 1, another task takes over."""

    class Losing(EventSQLConsumeOperator):
        def _calls(self, *given: Any) -> Any:
            consume = super()._calls(*given)

            def then_lose(held: Claim) -> Any:
                claims.append(held.id)
                if len(claims) == nth:
                    platform.claims.adopt(held.id, owner="airflow dag/thief")
                return consume(held)

            return then_lose

    claims: list[int] = []
    return Losing(task_id="consume", topic="rides", consumer="billing", limits=limits, python_callable=function)


def test_a_lost_claim_fails_the_task_without_a_retry(rides: EventSQL) -> None:
    publish(rides, 4)
    claim = claimed(rides)

    def overtaken(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if not taken:
            taken.append(True)
            return
        raise AssertionError("the claim is lost before the second batch")

    taken: list[bool] = []
    with pytest.raises(AirflowFailException, match="lost its claim"):
        losing(rides, overtaken, nth=1).execute(context_of(payloads=[payload(claim)]))
    assert effects(rides) == []


def test_a_task_that_loses_a_further_range_begins_no_range_of_another_partition(rides: EventSQL) -> None:
    publish(rides, 2, 0)
    publish(rides, 2, 1)
    partitions: list[int] = []

    def tell(events: Sequence[Event], connection: Connection) -> None:
        partitions.append(events[0].partition)

    limits = RunLimits(max_wait=0.0, drain_idle=0.0, max_events=1)
    with pytest.raises(AirflowFailException, match="lost its claim"):
        losing(rides, tell, nth=3, limits=limits).execute(context_of())
    assert partitions[:2] == [0, 1]
    assert 1 not in partitions[2:]


def test_a_function_over_a_claim_publishes_once_with_it(rides: EventSQL) -> None:
    rides.registry.register_topic(Topic("sums"))
    publish(rides, 3)
    claim = claimed(rides)

    def sum_up(claim: Claim, eventsql: EventSQLHook, context: Any) -> dict[str, Any]:
        events = eventsql.platform.claims.read(claim)
        total = sum(int(event.value) for event in events)
        return publish_output(context, [{"value": b"%d" % total}], topic="sums", eventsql=eventsql, claim=claim)

    context = context_of(payloads=[payload(claim)])
    assert operator(sum_up, gets="claim").execute(context)["events"] == 3
    with pytest.raises(AirflowSkipException):
        operator(sum_up, gets="claim").execute(context)
    rides.transfer.run_once()
    (event,) = [event for batch in rides.reader.stream("sums") for event in batch]
    assert (event.value, event.metadata["airflow_dag_id"]) == (b"3", "dag")


def test_the_database_that_goes_away_fails_the_try_and_the_next_one_continues(rides: EventSQL, direct_dsn: str) -> None:
    publish(rides, 4)
    claim = claimed(rides)

    def cut_off(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        with psycopg.connect(direct_dsn, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])

    with pytest.raises(DatabaseUnavailableError):
        operator(cut_off).execute(context_of(payloads=[payload(claim)]))
    operator().execute(context_of(payloads=[payload(claim)], try_number=2))
    assert effects(rides) == logged(rides)


async def asynchronous(events: Sequence[Event], connection: Connection) -> None: ...


def generating(events: Sequence[Event], connection: Connection) -> Any:
    yield


def without_connection(events: Sequence[Event], context: Any) -> None: ...


def over_events(events: Sequence[Event], connection: Connection) -> None: ...


@pytest.mark.parametrize(
    "wrong",
    [{"gets": "rows"}, {"batch": 0}, {"function": asynchronous}, {"function": generating}, {"function": "bill"},
     # Otherwise every event would fail, and become a dead letter.
     {"function": without_connection}, {"function": over_events, "gets": "claim"}],
)  # fmt: skip
def test_wrong_arguments_are_refused_when_the_dag_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        operator(**wrong)
