"""Workers of queues as assets: effects and acknowledgement are one transaction, whatever happens to the run."""

from __future__ import annotations

import logging
import math
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteRepositoryOrigin

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLAssetProps,
    EventSQLResource,
    EventSQLTranslator,
    TickOptions,
    WorkerDefinition,
    WorkLimits,
    build_definitions,
    queue_asset,
    queue_key,
    topic_key,
    worker_asset,
)
from eventsql_orchestration.dagster.consumers.decision import RunState
from eventsql_orchestration.dagster.consumers.tick import evaluate
from eventsql_orchestration.dagster.queues.tick import QueueWatch, RecentRuns, Waiting, why_not
from eventsql_orchestration.dagster.tags import location_tags
from eventsql_orchestration.dagster.trace.runs import StoredRuns
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseUnavailableError, PermissionDeniedError, ValidationError
from eventsql_orchestration.orchestration.trace.tracer import Tracer
from eventsql_orchestration.queue import Message, NewMessage, Queue, QueueOptions, held_messages
from tests.dagster.conftest import ONE, Metadata, Workbench, sql
from tests.effects import FullDiskError, PanicException
from tests.fixtures import Until
from tests.waiting import PATIENCE, wait_until

LIMITS = WorkLimits(max_wait=0.0, drain_idle=0.0, batch=5)
STATUS = dg.DagsterRunStatus


def write(messages: Sequence[Message], connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO effect (id, partition) VALUES (%s, 0)", [(each.id,) for each in messages])


def worker(function: Callable[..., Any], **options: Any) -> WorkerDefinition:
    given: dict[str, Any] = {"queue": "pictures", "name": "thumbnails", "limits": LIMITS, **options}
    return worker_asset(**given)(function)


thumbnails = worker(write)


class Work:
    """A queue, and ticks and runs of its workers."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.queue = Queue(bench.platform, "pictures")

    def send(self, count: int, **fields: Any) -> list[int]:
        return self.queue.send_all([NewMessage(b"%d" % number, **fields) for number in range(count)])

    def tick(self, definition: WorkerDefinition = thumbnails) -> Any:
        return self.bench.tick(definition.sensor)

    def run(
        self, definition: WorkerDefinition = thumbnails, request: dg.RunRequest | None = None
    ) -> dg.ExecuteInProcessResult:
        return self.bench.run(definition, request)

    def end_pauses(self) -> None:
        """Let the messages that failed be due."""
        sql(self.bench.platform, "UPDATE eventsql.queue_message SET eql_visible_at = now()")

    def receives(self) -> list[tuple[int, int]]:
        """For each remaining message, how often it was received, and how often it was not handled."""
        return sql(
            self.bench.platform, "SELECT eql_receives, eql_unhandled FROM eventsql.queue_message ORDER BY eql_id"
        )

    def handle_all_but_one(self, fault: Callable[[Connection], object]) -> None:
        """Run a worker that meets a fault at the second of three messages. The fault holds up no other message."""
        ids = self.send(3)

        def handle(messages: Sequence[Message], connection: Connection) -> None:
            write(messages, connection)
            if ids[1] in {message.id for message in messages}:
                fault(connection)

        assert not self.run(worker(handle)).success
        assert sorted(self.bench.effects()) == [ids[0], ids[2]]
        assert self.receives() == [(1, 0)]


@pytest.fixture
def work(bench: Workbench) -> Work:
    work = Work(bench)
    work.queue.definition()
    return work


def test_a_tick_requests_a_run_that_handles_all_messages(work: Work, metadata: Metadata) -> None:
    assert work.tick() == "no messages wait"
    ids = work.send(12)
    (request,) = work.tick()
    result = work.run(request=request)
    assert result.success
    assert sorted(work.bench.effects()) == ids
    found = metadata(result, thumbnails.key)
    assert {name: found[name] for name in ("queue", "messages", "batches", "dagster/row_count")} == {
        "queue": "pictures", "messages": 12, "batches": 3, "dagster/row_count": 12,
    }  # fmt: skip
    assert work.tick() == "no messages wait"


def test_a_run_that_finds_nothing_materializes_nothing(work: Work) -> None:
    result = work.run()
    assert result.success
    assert not result.get_asset_materialization_events()


def test_no_second_run_is_requested_while_one_is_under_way(work: Work) -> None:
    work.send(1)
    (request,) = work.tick()
    instance = work.bench.instance
    run = instance.create_run_for_job(work.bench.job(thumbnails), tags=dict(request.tags), status=STATUS.STARTING)
    assert run.run_id in work.tick()
    instance.report_run_canceled(run)
    assert len(work.tick()) == 1


def test_runs_of_another_location_handle_another_databases_queue(work: Work) -> None:
    """A location on a development database may have a queue of the same name, and Dagster may serve both."""
    work.send(1)
    (request,) = work.tick()
    instance, definition = work.bench.instance, work.bench.job(thumbnails)
    ours, theirs = RegisteredCodeLocationOrigin("ours"), RegisteredCodeLocationOrigin("theirs")
    job = RemoteRepositoryOrigin(theirs, "__repository__").get_job_origin(definition.name)
    instance.create_run_for_job(definition, tags=dict(request.tags), status=STATUS.STARTED, remote_job_origin=job)

    def requests(origin: RegisteredCodeLocationOrigin) -> int:
        watch = QueueWatch("pictures", "thumbnails", LIMITS, "work_thumbnails")
        own_runs = location_tags(origin, "__repository__")
        answer = evaluate(watch, work.bench.platform, instance, logging.getLogger, own_runs=own_runs)
        return 0 if isinstance(answer, dg.SkipReason) else len(answer)

    assert requests(ours) == 1
    assert requests(theirs) == 0


def test_a_queue_that_is_not_registered_is_named_by_the_tick_and_by_the_run(bench: Workbench) -> None:
    work = Work(bench)
    assert "launch the job `register`" in work.tick()
    result = work.run()
    assert not result.success
    assert "launch the job `register`" in str(result.all_events[-1].event_specific_data)


def test_a_tick_on_a_database_that_was_not_migrated_says_what_to_run(work: Work) -> None:
    sql(work.bench.platform, "DROP TABLE eventsql.queue CASCADE")
    assert "run `eventsql migrate`" in work.tick()


def test_a_tick_ends_when_the_database_does_not_answer_in_time(work: Work) -> None:
    hurried = worker(write, ticks=TickOptions(statement_timeout=0.5))
    work.send(1)
    with work.bench.platform.database.transaction() as connection:
        connection.execute("LOCK TABLE eventsql.queue_message")
        assert "statement timeout" in work.tick(hurried)
    assert len(work.tick(hurried)) == 1


def test_a_failing_message_delays_no_other_and_becomes_a_dead_letter(work: Work) -> None:
    work.queue = Queue(work.bench.platform, "pictures", max_receives=2)
    ids = work.send(5)
    calls = []

    def stumble(messages: Sequence[Message], connection: Connection) -> None:
        calls.append(len(messages))
        write(messages, connection)
        if any(each.id == ids[2] for each in messages):
            raise ValueError("no such picture")

    definition = worker(stumble, backoff=lambda _: 600.0)
    for again in range(2):
        (request,) = work.tick(definition)
        result = work.run(definition, request)
        assert not result.success
        messages = [entry.user_message for entry in work.bench.instance.all_logs(result.run_id)]
        assert sum("in stumble" in message for message in messages) == 1
        # Others were handled, and belong to the asset's history.
        event = dg.DagsterEventType.ASSET_MATERIALIZATION
        assert len(work.bench.instance.all_logs(result.run_id, of_type=event)) == 1 - again
        work.end_pauses()
    assert calls == [5, 1, 1, 1, 1, 1, 1]
    assert work.bench.effects() == [*ids[:2], *ids[3:]]

    # The receive at the end of the last run makes the message a dead letter, without a pause.
    assert work.queue.statistics().dead == 1
    # The failures of messages make no pause between runs.
    work.send(1)
    (request,) = work.tick(definition)
    assert work.run(definition, request).success
    (letter,) = Queue(work.bench.platform, "pictures_dead").peek()
    assert [entry["reason"] for entry in letter.history][:2] == ["ValueError: no such picture"] * 2


@pytest.mark.parametrize("error", [CancelledError, SystemExit, PanicException])
def test_a_message_whose_task_was_cancelled_exits_or_panics_delays_no_other(
    work: Work, error: type[BaseException]
) -> None:
    work.handle_all_but_one(Mock(side_effect=error))


def test_a_message_that_names_a_table_that_nobody_made_delays_no_other(work: Work) -> None:
    work.handle_all_but_one(lambda connection: connection.execute("SELECT FROM eventsql.view_of_nobody"))


def test_a_run_ends_if_every_message_of_a_large_batch_fails_and_runs_that_fail_are_paused(work: Work) -> None:
    work.send(25)

    def fail(messages: Sequence[Message], connection: Connection) -> None:
        raise ValueError("no service")

    ticks = TickOptions(first_backoff=PATIENCE, max_backoff=PATIENCE)
    definition = worker(fail, limits=replace(LIMITS, batch=10), ticks=ticks, backoff=lambda _: 0.0)
    for _ in range(2):
        (request,) = work.tick(definition)
        assert not work.run(definition, request).success
    assert sum(receives for receives, _ in work.receives()) == 20
    assert "2 runs in a row failed; the next is requested in" in work.tick(definition)
    hasty = worker(fail, limits=LIMITS, ticks=TickOptions(first_backoff=0.01))
    wait_until(lambda: isinstance(work.tick(hasty), list), "the end of the pause")


def test_a_run_that_succeeds_ends_the_pauses(work: Work) -> None:
    failing = True

    def handle(messages: Sequence[Message], connection: Connection) -> None:
        if failing:
            raise ValueError("no service")

    definition = worker(handle, limits=replace(LIMITS, batch=10), backoff=lambda _: 0.0)
    for failing in (True, False, True):
        work.send(25)
        (request,) = work.tick(definition)
        assert work.run(definition, request).success is not failing
    assert isinstance(work.tick(definition), list)


@pytest.mark.parametrize("error", [DatabaseUnavailableError, FullDiskError, PermissionDeniedError])
def test_a_database_that_refuses_costs_no_message_a_receive_and_the_retried_step_goes_on(
    work: Work, error: type[Exception]
) -> None:
    ids = work.send(5)
    cut = iter([True])

    def cut_off(messages: Sequence[Message], connection: Connection) -> None:
        write(messages, connection)
        if next(cut, False):
            raise error
        assert work.receives() == [(2, 1)] * 5

    definition = worker(cut_off, options=AssetOptions(retry_policy=dg.RetryPolicy(max_retries=1)))
    result = work.run(definition)
    assert result.success
    assert sum(event.event_type == dg.DagsterEventType.STEP_RESTARTED for event in result.all_events) == 1
    assert sorted(work.bench.effects()) == ids


def test_a_handler_whose_transaction_idles_for_too_long_holds_up_no_other_message(work: Work, until: Until) -> None:
    def idle(connection: Connection) -> None:
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '50ms'")
        alive, session = "SELECT FROM pg_stat_activity WHERE pid = %s", connection.info.backend_pid
        until(lambda: not sql(work.bench.platform, alive, session))

    work.handle_all_but_one(idle)


def test_a_terminated_run_gives_its_messages_back_at_once(work: Work) -> None:
    work.send(5)

    def terminated(messages: Sequence[Message], connection: Connection) -> None:
        raise KeyboardInterrupt

    assert not work.run(worker(terminated)).success
    assert work.receives() == [(1, 1)] * 5
    assert work.queue.statistics().visible == 5


def test_executing_a_run_again_replays_nothing(work: Work) -> None:
    ids = work.send(3)
    (request,) = work.tick()
    first = work.run(request=request)
    for tags in ({}, {"dagster/retry_number": "1"}):
        again = {**request.tags, **tags, "dagster/parent_run_id": first.run_id}
        assert work.run(request=dg.RunRequest(run_config=request.run_config, tags=again)).success
    assert sorted(work.bench.effects()) == ids


def test_heartbeats_keep_the_messages_of_a_slow_batch(
    work: Work, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_messages, "HEARTBEATS", 100_000)
    Queue(work.bench.platform, "pictures", visibility_timeout=3_600).definition()
    ids = work.send(2)

    def slow(messages: Sequence[Message], connection: Connection) -> None:
        write(messages, connection)
        look = "SELECT min(eql_visible_at) FROM eventsql.queue_message"
        first = sql(work.bench.platform, look)
        until(lambda: sql(work.bench.platform, look) != first)
        assert not work.queue.receive()

    assert work.run(worker(slow)).success
    assert sorted(work.bench.effects()) == ids


def test_a_handler_that_ends_its_transaction_is_told_so(work: Work) -> None:
    work.send(1)

    def commit(messages: Sequence[Message], connection: Connection) -> None:
        connection.execute("COMMIT")

    result = work.run(worker(commit))
    assert not result.success
    (message,) = work.queue.peek()
    assert "ended or broke the transaction" in message.history[0]["reason"]


def test_a_handler_that_misses_a_message_of_another_queue_fails_and_is_told_so(work: Work) -> None:
    work.send(1)
    others = Queue(work.bench.platform, "others")
    others.send(b"")
    (taken,) = others.receive()
    others.acknowledge(taken)

    def late(messages: Sequence[Message], connection: Connection) -> None:
        write(messages, connection)
        others.acknowledge(taken, connection=connection)

    assert not work.run(worker(late)).success
    assert work.bench.effects() == []
    (message,) = work.queue.peek()
    assert message.history[0]["reason"].startswith("MessageNotFoundError")


def test_messages_of_a_key_are_handled_in_order(work: Work) -> None:
    queue = Queue(work.bench.platform, "letters", ordered=True)
    sent = [queue.send(b"", key=f"{number % 2}") for number in range(6)]
    keys: list[list[str]] = []

    def note(messages: Sequence[Message], connection: Connection) -> None:
        keys.append(sorted(str(each.key) for each in messages))
        write(messages, connection)

    assert work.run(worker(note, queue="letters")).success
    assert keys == [["0", "1"]] * 3
    assert sorted(work.bench.effects()) == sent
    effects = work.bench.effects()
    assert [each for each in effects if each in sent[::2]] == sent[::2]


def test_a_run_shows_that_it_lives(work: Work, shared_instance: dg.DagsterInstance, until: Until) -> None:
    work.send(1)
    # Threads share this storage. A storage in memory refuses one thread while another writes.
    instance = work.bench.instance = shared_instance

    def slow(messages: Sequence[Message], connection: Connection, context: dg.AssetExecutionContext) -> None:
        def shown() -> bool:
            run = instance.get_run_by_id(context.run.run_id)
            return run is not None and int(run.tags.get(".dagster/eventsql_alive", "0")) >= 2

        until(shown)

    assert work.run(worker(slow, limits=replace(LIMITS, lease=1.0))).success


def _run(status: dg.DagsterRunStatus, unchanged: float = 0.0) -> RunState:
    return RunState("r", status, unchanged=unchanged)


@pytest.mark.parametrize(
    ("waiting", "runs", "requested"),
    [
        (Waiting(0, 0.0), RecentRuns(), False),
        (Waiting(1, 0.0), RecentRuns(), False),
        (Waiting(1, 6.0), RecentRuns(), True),
        (Waiting(3, 0.0), RecentRuns(), True),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.QUEUED, 1e6)]), False),
        (Waiting(3, 9.0), RecentRuns([replace(_run(STATUS.STARTED, 1e6), waits=True)]), False),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.STARTING, 299.0)]), False),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.STARTING, 301.0)]), True),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.STARTED, 61.0)] * 2), True),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.CANCELING, 59.0)] * 2), False),
        # A further run, if the runs under way have started and a message still waits for too long.
        (Waiting(3, 1.0), RecentRuns([_run(STATUS.STARTED)]), False),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.STARTED)]), True),
        (Waiting(3, 9.0), RecentRuns([_run(STATUS.STARTED)] * 2), False),
        (Waiting(3, 9.0), RecentRuns([], failures=1), True),
        (Waiting(3, 9.0), RecentRuns([], failures=2, since_failure=9.0), False),
        (Waiting(3, 9.0), RecentRuns([], failures=2, since_failure=11.0), True),
    ],
)
def test_when_a_tick_requests_a_run(waiting: Waiting, runs: RecentRuns, *, requested: bool) -> None:
    limits = WorkLimits(min_messages=3, max_wait=5.0, max_runs=2)
    assert (why_not(waiting, runs, limits, TickOptions()) is None) is requested


def test_a_run_works_on_one_shard_and_ticks_look_at_each(shards: dict[str, Workbench]) -> None:
    works = {name: Work(bench) for name, bench in shards.items()}
    some = next(iter(works.values()))
    thumbnails.register(some.bench.eventsql.platform)
    for each in works.values():
        each.send(2)
    requests = some.tick()
    assert sorted(request.tags["eventsql/shard"] for request in requests) == sorted(works)
    assert some.run(request=requests[0]).success
    effects = {name: len(each.bench.effects()) for name, each in works.items()}
    assert effects == {name: 2 * (name == requests[0].tags["eventsql/shard"]) for name in works}
    assert some.run().success
    assert all(len(each.bench.effects()) == 2 for each in works.values())


def test_a_run_on_several_shards_hands_over_messages_of_one_shard_at_a_time(shards: dict[str, Workbench]) -> None:
    works = [Work(bench) for bench in shards.values()]
    seen: list[set[str | None]] = []

    def tell(messages: Sequence[Message], connection: Connection) -> None:
        seen.append({message.shard for message in messages})
        write(messages, connection)

    definition = worker(tell)
    definition.register(works[0].bench.eventsql.platform)
    for work in works:
        work.send(2)
    assert works[0].run(definition).success
    assert sorted(seen, key=str) == sorted(({shard} for shard in shards), key=str)


def test_a_run_ends_if_every_message_of_one_shard_fails_though_those_of_another_shard_do_not(
    shards: dict[str, Workbench],
) -> None:
    works = {shard: Work(bench) for shard, bench in shards.items()}
    first: list[str | None] = []

    def fail_on_the_first(messages: Sequence[Message], connection: Connection) -> None:
        first.append(messages[0].shard)
        # On the other shard, each message succeeds alone.
        if messages[0].shard == first[0] or len(messages) > 1:
            raise ValueError("no service")
        write(messages, connection)

    definition = worker(fail_on_the_first, limits=replace(LIMITS, batch=20), backoff=lambda _: 0.0)
    definition.register(works[ONE].bench.eventsql.platform)
    for work in works.values():
        work.send(10)
    assert not works[ONE].run(definition).success
    assert {shard: work.receives() for shard, work in works.items()} == {
        shard: [(1, 0)] * 10 * (shard == first[0]) for shard in works
    }


class Shop(EventSQLTranslator):
    def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
        return props.spec.replace_attributes(group_name=f"{props.queue}_{props.consumer}")


def test_a_location_has_the_queue_and_its_worker_with_their_options(platform: EventSQL, dsn: str) -> None:
    definition = worker(
        write, queue_options=QueueOptions(max_receives=3), name="thumbs",
        options=AssetOptions(key_prefix="shop", owners=["team:shop"], metadata={"a": 1}, deps=[topic_key("moved")]),
    )  # fmt: skip
    location = build_definitions([], workers=[definition], topics=[Topic("moved")], notify=print)
    dg.Definitions.validate_loadable(location)
    graph = location.resolve_asset_graph()
    found = graph.get(definition.key)
    assert found.key.path == ["shop", "thumbs"]
    assert found.parent_keys == {queue_key("pictures"), topic_key("moved")}
    assert found.metadata["a"] == 1
    assert {key.name for key in graph.asset_check_keys} == {"lag", "delivered"}
    assert {sensor.name for sensor in location.sensors or []} >= {"work_thumbs", "queues", "alerts"}
    register = location.resolve_job_def("register")
    for _ in range(2):
        assert register.execute_in_process(resources={"eventsql": EventSQLResource(dsn=dsn)}).success
    assert Queue(platform, "pictures").definition().max_receives == 3


def test_a_translator_may_change_everything_except_the_key_of_a_queue() -> None:
    assert queue_asset("pictures", translator=Shop()).group_name == "pictures_None"
    definition = worker(write, options=AssetOptions(translator=Shop()))
    assert next(iter(definition.asset.specs)).group_name == "pictures_thumbnails"

    class Moving(EventSQLTranslator):
        def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
            return props.spec.replace_attributes(key="elsewhere")

    with pytest.raises(ValidationError):
        queue_asset("pictures", translator=Moving())


@pytest.mark.parametrize(
    "given",
    [
        {"queue": ""},
        {"queue": "thumbnails"},
        {"queue_options": QueueOptions(dead_letters="pictures")},
        {"limits": {"batch": 5}},
        {"backoff": 5},
        {"ticks": 5},
    ],
)
def test_an_impossible_worker_is_refused_at_definition(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        worker(write, **given)


@pytest.mark.parametrize(
    "given",
    [{"batch": 0}, {"batch": 10_001}, {"max_runs": 0}, {"lease": 0}, {"drain_idle": -1}, {"drain_idle": math.inf}],
)
def test_limits_that_exclude_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WorkLimits(**given)


def test_two_workers_of_one_queue_are_refused() -> None:
    with pytest.raises(ValidationError):
        build_definitions([], workers=[thumbnails, worker(write, name="other")])


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    # Dagster has a thread `grpc-client-heartbeat`.
    assert not [each.name for each in threading.enumerate() if each.name.startswith(("heartbeat-", "signs-"))]


def test_answers_are_published_with_the_acknowledgement_or_not_at_all(work: Work, metadata: Metadata) -> None:
    ids = work.send(4)
    answers = Topic("answers")
    failing = [True]

    def answer(messages: Sequence[Message], connection: Connection) -> list[Publication]:
        if failing and any(each.id == ids[1] for each in messages):
            raise ValueError("not yet")
        return [Publication("answers", each.body) for each in messages]

    definition = worker(
        answer, publishes=answers, backoff=lambda _: 600.0, options=AssetOptions(owners=["team:shop"], code_version="2")
    )  # fmt: skip
    assert {(*spec.owners, spec.code_version) for spec in definition.asset.specs} == {("team:shop", "2")}
    definition.register(work.bench.platform)
    assert {spec.key for spec in definition.asset.specs} == {definition.key, topic_key("answers")}
    assert not work.run(definition).success
    failing.clear()
    work.end_pauses()
    result = work.run(definition)
    assert result.success
    work.bench.platform.transfer.run_once()
    events = work.bench.platform.reader.read("answers")
    assert sorted(event.value for event in events) == [b"0", b"1", b"2", b"3"]
    assert events[-1].metadata["dagster_run_id"] == result.run_id
    assert metadata(result, topic_key("answers"))["published events"] == 1
    origin = Tracer(work.bench.platform, {"Dagster": StoredRuns(work.bench.instance)}).trace("answers", events[-1].id)
    assert (origin.run_id, origin.notes) == (result.run_id, ("it handled messages of queue 'pictures'",))


def test_a_topic_for_answers_can_be_given_by_its_name_and_is_not_created(work: Work) -> None:
    work.send(1)

    def answer(messages: Sequence[Message], connection: Connection) -> list[Publication]:
        return [Publication("answers", each.body) for each in messages]

    definition = worker(answer, publishes="answers")
    assert {spec.key for spec in definition.asset.specs} == {definition.key, topic_key("answers")}
    definition.register(work.bench.platform)
    assert not work.run(definition).success
    work.bench.platform.registry.register_topic(Topic("answers"))
    work.end_pauses()
    assert work.run(definition).success
    assert work.bench.platform.buffered() == {"answers": 1}


def test_a_run_warns_once_of_results_that_nothing_uses(work: Work) -> None:
    def count(messages: Sequence[Message], connection: Connection) -> dict[str, int]:
        write(messages, connection)
        return {"messages": len(messages)}

    ids = work.send(3)
    result = work.run(worker(count, limits=replace(LIMITS, batch=1)))
    assert result.success
    assert sorted(work.bench.effects()) == ids
    warnings = [each for each in work.bench.instance.all_logs(result.run_id) if each.level == logging.WARNING]
    assert ["dict" in each.user_message for each in warnings] == [True]


@pytest.mark.parametrize(
    ("publishes", "returned"),
    [
        (Topic("answers"), b"x"),
        (Topic("answers"), [Publication("others", b"x")]),
        (Topic("answers"), [b"x"]),
        (Topic("answers"), ""),
        ((), [Publication("answers", b"x")]),
    ],
)
def test_an_invalid_answer_fails_and_publishes_nothing(work: Work, publishes: Any, returned: object) -> None:
    work.send(1)

    def answer(messages: Sequence[Message], connection: Connection) -> object:
        return returned

    definition = worker(answer, publishes=publishes)
    definition.register(work.bench.platform)
    assert not work.run(definition).success
    assert work.queue.statistics().depth == 1
    assert work.bench.platform.buffered() == {}
