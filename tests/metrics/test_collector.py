"""A scrape has the figures of the database, its counters never go back, and many scrapers cost one reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.metrics import PlatformCollector
from eventsql_orchestration.metrics.collector import PATIENCE
from eventsql_orchestration.metrics.counts import Highest, Totals
from eventsql_orchestration.metrics.figures import FiguresReader
from eventsql_orchestration.metrics.readings import Readings
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.queue import lag as queue_lag
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.storage import metrics as storage_metrics
from eventsql_orchestration.store import Change
from tests import waiting
from tests.fixtures import SaidBy, Sessions
from tests.forms import stored
from tests.roles.conftest import As, as_, login, owner, prefix, shared_prefix, template
from tests.shards.conftest import Databases, databases

__all__ = ["as_", "databases", "login", "owner", "prefix", "shared_prefix", "template"]


class Scrape:
    """The samples of one scrape."""

    def __init__(self, collector: PlatformCollector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self.families: list[Metric] = list(registry.collect())
        self.samples = [sample for family in self.families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        found = [each for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no {name} with {labels}"
        return sum(each.value for each in found)


@pytest.fixture
def scrape(platform: EventSQL) -> Callable[[], Scrape]:
    """Scrapes the platform; each scrape reads the database, however soon it comes."""
    collector = PlatformCollector(platform)

    def now() -> Scrape:
        for readings in collector._readings.values():
            readings._latest = None
        return Scrape(collector)

    return now


def publish(platform: EventSQL, topic: str, *counts: int) -> None:
    """Publish so many events in each partition, and transfer them."""
    platform.publisher.publish_all(
        Publication(topic, b"", partition=partition) for partition, count in enumerate(counts) for _ in range(count)
    )
    platform.transfer.run_once()


def consume(platform: EventSQL, topic: str, consumer: str) -> None:
    def handle(_events: Sequence[Event], _connection: Connection) -> None:
        pass

    while platform.consumers.consume_once(topic, consumer, handle):
        pass


def execute(platform: EventSQL, statement: str) -> None:
    with platform.database.connection() as connection:
        connection.execute(statement.encode())


@pytest.fixture
def orders(platform: EventSQL) -> EventSQL:
    platform.registry.register_topic(Topic("orders", 3, retention=Retention(seconds=3600, bytes=10**9)))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=2)
    platform.registry.register_consumer(Consumer("orders", "auditor"))
    return platform


def test_a_scrape_follows_events_from_the_buffer_to_the_consumer(
    orders: EventSQL, scrape: Callable[[], Scrape]
) -> None:
    with orders.database.transaction() as connection:
        for partition in (0, 1, 1):
            orders.publisher.publish(Publication("orders", b"", partition=partition), connection=connection)
    execute(
        orders, "UPDATE eventsql.event_buffer SET eql_created_at = now() - interval '1 hour' WHERE eql_partition = 1"
    )
    before = scrape()
    assert {each.labels["shard"] for each in before.samples} == {""}
    assert before("eventsql_up") == 1
    assert before("eventsql_reading_seconds") > 0
    assert before("eventsql_topic_partitions", topic="orders") == 3
    assert before("eventsql_topic_oldest_seconds", topic="orders") == 0
    assert before("eventsql_buffer_events", topic="orders") == 3
    assert before("eventsql_events_published_total", topic="orders") == 3
    assert before("eventsql_events_transferred_total", topic="orders") == 0
    assert before("eventsql_consumer_lag_events", consumer="mailer", cause="transfer") == 3
    assert before("eventsql_consumer_lag_events", consumer="mailer", cause="waiting") == 0
    assert before("eventsql_consumer_lag_events", consumer="auditor", cause="transfer") == 3
    assert "unreachable" not in {each.labels.get("cause") for each in before.samples}
    assert before("eventsql_consumer_partitions", consumer="mailer", cause="transfer") == 2
    assert before("eventsql_consumer_partitions", consumer="mailer", cause="none") == 1
    assert before("eventsql_buffer_seconds", topic="orders") >= 3600
    assert before("eventsql_consumer_lag_seconds", consumer="auditor") >= 3600

    orders.transfer.run_once()
    moved = scrape()
    assert moved("eventsql_buffer_events") == 0
    assert moved("eventsql_events_published_total") == moved("eventsql_events_transferred_total") == 3
    assert moved("eventsql_consumer_lag_events", consumer="auditor", cause="waiting") == 3
    assert moved("eventsql_consumer_lag_seconds", consumer="auditor") > 0
    assert moved("eventsql_topic_bytes", topic="orders") > 0
    assert moved("eventsql_topic_oldest_seconds", topic="orders") > 0
    assert moved("eventsql_retention_seconds", topic="orders") == 3600
    assert moved("eventsql_retention_bytes", topic="orders") == 10**9

    consume(orders, "orders", "auditor")
    after = scrape()
    assert after("eventsql_events_consumed_total", consumer="auditor") == 3
    assert after("eventsql_events_consumed_total", consumer="mailer") == 0
    assert after("eventsql_consumer_lag_events", consumer="auditor") == 0
    assert after("eventsql_consumer_lag_seconds", consumer="auditor") == 0


def test_the_lag_is_that_of_the_command_lag_for_every_cause(orders: EventSQL, scrape: Callable[[], Scrape]) -> None:
    publish(orders, "orders", 2, 3, 4)
    orders.registry.pause("orders", "auditor")
    orders.registry.register_consumer(Consumer("orders", "follower"))
    execute(orders, f"UPDATE eventsql.consumer SET eql_until = {HELD} WHERE eql_name = 'follower'")
    execute(orders, "UPDATE eventsql.consumer SET eql_until = 1 WHERE eql_name = 'mailer'")
    execute(
        orders,
        "UPDATE eventsql.consumer SET eql_failed_event_id = 9, eql_attempts = 2, eql_failure = 'no' "
        "WHERE eql_name = 'mailer' AND eql_partition = 2",
    )
    found = scrape()
    lags = orders.lag()
    causes = {lag.cause.value.replace(" ", "_") for lag in lags}
    assert causes == {"paused", "waiting", "held_back", "blocked"}
    for lag in lags:
        cause = lag.cause.value.replace(" ", "_")
        assert found("eventsql_consumer_lag_events", consumer=lag.consumer, cause=cause) == lag.events
        assert found("eventsql_consumer_partitions", consumer=lag.consumer, cause=cause) == 1


def test_a_long_backlog_is_counted_to_a_bound_and_estimated_from_there(
    orders: EventSQL, scrape: Callable[[], Scrape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_metrics, "COUNTED", 10)
    for _ in range(20):
        publish(orders, "orders", 1, 3)
    found = scrape()
    assert found("eventsql_consumer_lag_events", consumer="auditor") == 80
    assert found("eventsql_consumer_lag_events", consumer="mailer") == pytest.approx(80, rel=0.1)


def test_dead_letters_and_claims_are_counted(orders: EventSQL, scrape: Callable[[], Scrape]) -> None:
    orders.registry.register_topic(Topic("orders_dlt", 3))
    publish(orders, "orders", 2)
    claim = orders.claims.claim("orders", "mailer", 0, owner="me", lease=60.0, max_events=2)
    assert claim is not None
    execute(orders, "UPDATE eventsql.consumer SET eql_given_up = 1 WHERE eql_name = 'auditor'")
    publish(orders, "orders_dlt", 2)
    execute(orders, "INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) VALUES ('orders_dlt', 1)")
    found = scrape()
    assert found("eventsql_dead_letters_total", topic="orders", consumer="auditor") == 1
    assert found("eventsql_dead_letters_open", topic="orders") == 1
    assert found("eventsql_claims_live", topic="orders", consumer="mailer") == 1
    assert found("eventsql_claims_expired", topic="orders", consumer="mailer") == 0
    execute(
        orders, "UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s' WHERE eql_partition = 0"
    )
    execute(orders, "UPDATE eventsql.consumer_claim SET eql_created_at = now() - interval '1 hour'")
    expired = scrape()
    assert expired("eventsql_claims_expired", topic="orders", consumer="mailer") == 1
    assert 3600 <= expired("eventsql_claim_oldest_seconds", topic="orders", consumer="mailer") < 3700

    # A process that needs no claims consumes the range.
    consume(orders, "orders", "mailer")
    assert "eventsql_claims_expired" not in {sample.name for sample in scrape().samples}


def test_a_subscription_is_behind_by_the_changes_that_it_has_not_handled(
    platform: EventSQL, scrape: Callable[[], Scrape], sessions: Sessions
) -> None:
    platform.store.append("order", "1", [Change("placed", {}), Change("paid", {})], expected_version=0)
    execute(platform, "UPDATE eventsql.aggregate_change SET eql_created_at = now() - interval '1 hour'")
    mailer = platform.store.subscribe("mailer", lambda _change, _connection: None, background=False)

    def of(metric: str) -> float:
        return now(f"eventsql_subscription_{metric}", subscription="mailer")

    now = scrape()
    assert (of("lag_changes"), of("changes_handled_total"), of("held_back")) == (2, 0, 0)
    assert 3600 <= of("lag_seconds") < 3700

    mailer.run_once()
    held = sessions()
    held.execute("SELECT pg_current_xact_id()")
    platform.store.append("order", "1", [Change("sent", {})], expected_version=2)
    now = scrape()
    assert (of("lag_changes"), of("changes_handled_total"), of("held_back")) == (0, 2, 1)
    # The transaction began before the change.
    assert 0 < of("lag_seconds") < of("held_back_seconds") < 600

    held.commit()
    mailer.run_once()
    now = scrape()
    assert (of("lag_seconds"), of("held_back_seconds"), of("changes_handled_total")) == (0, 0, 3)

    # As in a dump that was restored on another server, and is not adopted yet.
    execute(platform, "UPDATE eventsql.store_home SET eql_server = '1'")
    now = scrape()
    assert now("eventsql_up") == 1
    assert not [each for each in now.samples if "subscription" in each.name]


def test_failed_attempts_at_a_change_are_counted(platform: EventSQL, scrape: Callable[[], Scrape]) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no")

    mailer = platform.store.subscribe("mailer", refuse, background=False)
    platform.store.append("order", "1", [Change("placed", {})], expected_version=0)
    while mailer.run_once().more:
        pass
    now = scrape()
    assert now("eventsql_subscription_attempts", subscription="mailer") == 1
    assert now("eventsql_subscription_dead_letters", subscription="mailer") == 0


def test_a_topic_has_the_limits_that_its_retention_has(platform: EventSQL, scrape: Callable[[], Scrape]) -> None:
    platform.registry.register_topic(Topic("orders", retention=Retention(seconds=3600)))
    platform.registry.register_topic(Topic("payments", retention=Retention(bytes=10**9)))
    limits = {(each.name, each.labels["topic"]) for each in scrape().samples if "retention" in each.name}
    assert limits == {("eventsql_retention_seconds", "orders"), ("eventsql_retention_bytes", "payments")}


def test_messages_of_queues_are_counted_by_their_state(
    platform: EventSQL, scrape: Callable[[], Scrape], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Queue(platform, "commands", ordered=True, max_receives=1, dead_letters="given_up")
    commands.send_all([NewMessage(b"", key=key) for key in "aab"])
    commands.send_all([NewMessage(b"", delay=600.0), NewMessage(b"", priority=9), NewMessage(b"", priority=9)])
    assert len(commands.receive(max_messages=2)) == 2
    execute(
        platform, "UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 hour' WHERE eql_key = 'b'"
    )

    def of(metric: str, **labels: str) -> float:
        return now(f"eventsql_queue_{metric}", **{"queue": "commands", **labels})

    def by_state() -> list[float]:
        return [of("messages", state=state) for state in ("visible", "in_flight", "delayed", "blocked")]

    now = scrape()
    assert by_state() == [2, 2, 1, 1]
    assert 3600 <= of("waiting_seconds") < 3700

    assert [message.key for message in commands.receive(max_messages=10)] == ["a", "b"]
    execute(
        platform, "UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 hour' WHERE eql_key = 'b'"
    )
    assert commands.receive() == []
    now = scrape()
    assert by_state() == [0, 3, 1, 1]
    assert (of("waiting_seconds"), of("dead_letters")) == (0, 1)
    assert (of("messages", queue="given_up", state="visible"), of("waiting_seconds", queue="given_up")) == (1, 0)

    monkeypatch.setattr(queue_lag, "COUNTED", 2)
    now = scrape()
    assert by_state() == [0, 2, 1, 1]


def test_a_reader_without_rights_on_the_store_has_the_other_metrics(owner: EventSQL, as_: As) -> None:
    Queue(owner, "thumbnails").send(b"")
    owner.store.subscribe("mailer", lambda _change, _connection: None, background=False)
    found = Scrape(PlatformCollector(as_("reader")))
    assert found("eventsql_up") == 1
    assert not [each for each in found.samples if "subscription" in each.name]
    assert found("eventsql_queue_messages", queue="thumbnails", state="visible") == 1


def test_a_reader_that_may_not_see_the_transaction_that_holds_changes_back_gets_no_age_of_it(
    owner: EventSQL, as_: As, prefix: str, sessions: Sessions
) -> None:
    owner.store.subscribe("mailer", lambda _change, _connection: None, background=False)
    execute(owner, f"GRANT SELECT ON ALL TABLES IN SCHEMA eventsql TO {prefix}_reader")
    sessions().execute("SELECT pg_current_xact_id()")
    owner.store.append("order", "1", [Change("placed", {})], expected_version=0)
    found = Scrape(PlatformCollector(as_("reader")))
    assert found("eventsql_subscription_held_back", subscription="mailer") == 1
    assert "eventsql_subscription_held_back_seconds" not in {sample.name for sample in found.samples}


def test_counters_do_not_go_back_and_begin_anew_with_a_new_topic(
    orders: EventSQL, scrape: Callable[[], Scrape]
) -> None:
    publish(orders, "orders", 1, 1, 2)
    consume(orders, "orders", "mailer")
    assert scrape()("eventsql_events_consumed_total", consumer="mailer") == 4
    # As retention leaves the log, and a repartitioning to fewer partitions the consumer.
    execute(orders, f"DELETE FROM eventsql.{stored('orders')}")
    execute(orders, "DELETE FROM eventsql.consumer WHERE eql_name = 'mailer' AND eql_partition = 2")
    found = scrape()
    assert found("eventsql_events_published_total") == found("eventsql_events_transferred_total") == 4
    assert found("eventsql_events_consumed_total", consumer="mailer") == 4
    orders.registry.unregister_consumer("orders", "mailer")
    orders.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    assert scrape()("eventsql_events_consumed_total", consumer="mailer") == 4

    orders.registry.unregister_topic("orders", force=True)
    orders.registry.register_topic(Topic("orders", 3))
    assert scrape()("eventsql_events_published_total") == 0


def test_a_count_that_was_too_high_for_a_moment_is_not_taken_back() -> None:
    published = Highest()
    assert [published.of({"orders": count}) for count in (6, 3, 7)] == [{"orders": count} for count in (6, 6, 7)]
    assert published.of({}) == {}
    assert published.of({"orders": 1}) == {"orders": 1}


def test_a_part_that_was_made_anew_adds_what_it_has_counted_since() -> None:
    consumed = Totals()
    found = [consumed.of({("mailer", 0): count}) for count in (5, 2, 3)]
    assert found == [{"mailer": count} for count in (5, 7, 8)]


def test_a_scrape_that_is_held_up_counts_nothing_again(
    orders: EventSQL, scrape: Callable[[], Scrape], monkeypatch: pytest.MonkeyPatch
) -> None:
    def consumed() -> float:
        return scrape()("eventsql_events_consumed_total", consumer="mailer")

    latest, readings = Readings.latest, list[Any]()

    def noted(*given: Any) -> Any:
        readings.append(latest(*given))
        return readings[-1]

    monkeypatch.setattr(Readings, "latest", noted)
    for total in (4, 7):
        publish(orders, "orders", total - len(orders.reader.read("orders")))
        consume(orders, "orders", "mailer")
        assert consumed() == total
    # One of several scrapers got the first reading, and goes on with it only now.
    monkeypatch.setattr(Readings, "latest", lambda *_: readings[0])
    assert consumed() == 4
    monkeypatch.setattr(Readings, "latest", latest)
    assert consumed() == 7


def test_side_consumers_of_backfills_and_partitions_bring_no_series(orders: EventSQL) -> None:
    side = Consumer("orders", "mailer__backfill_b1_0_10", partitioned=True)
    orders.registry.register_consumer(side)
    publish(orders, "orders", 2, 3)
    assert isinstance(orders.claims.claim("orders", side.name, 0, owner="me"), Claim)
    usual = Scrape(PlatformCollector(orders))
    assert {each.labels.get("consumer") for each in usual.samples} == {None, "mailer", "auditor"}
    assert all("partition" not in each.labels for each in usual.samples)
    asked = Scrape(PlatformCollector(orders, partitions=True))
    assert len([each for each in asked.samples if each.name == "eventsql_partition_lag_events"]) == 4
    assert asked("eventsql_partition_lag_events", consumer="mailer", partition="1") == 3
    assert asked("eventsql_partition_lag_seconds", consumer="mailer", partition="1") > 0


def test_a_reading_has_a_fixed_number_of_statements_for_each_topic(orders: EventSQL, said_by: SaidBy) -> None:
    reader = FiguresReader(orders.database)
    reader.read()
    said = said_by(orders.database)

    def statements() -> int:
        reader.read()
        return len([each for each in said.statements() if each != ";"])

    one = statements()
    assert one <= 17
    publish(orders, "orders", 1, 0, 0)
    said.statements()
    # Events are counted only if a consumer has some left.
    assert statements() == one + 1
    publish(orders, "orders", 50, 50, 50)
    for number in range(5):
        orders.registry.register_consumer(Consumer("orders", f"more_{number}", partitioned=True))
    said.statements()
    assert statements() == one + 1
    orders.registry.register_topic(Topic("payments"))
    said.statements()
    assert statements() == one + 2
    orders.registry.register_topic(Topic("payments_dlt"))
    orders.registry.register_consumer(Consumer("payments", "auditor"))
    said.statements()
    assert statements() == one + 5
    for name in ("mailer", "auditor"):
        orders.store.subscribe(name, lambda _change, _connection: None, background=False)
    said.statements()
    assert statements() <= one + 5 + 4


def test_a_topic_that_is_deleted_while_it_is_read_is_left_out(
    orders: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.registry.register_topic(Topic("payments"))
    readable = storage_metrics.LogMetrics.readable

    def then_deleted(*given: Any) -> list[str]:
        monkeypatch.undo()
        found = readable(*given)
        orders.registry.unregister_topic("payments")
        return found

    monkeypatch.setattr(storage_metrics.LogMetrics, "readable", then_deleted)
    assert [each.topic for each in FiguresReader(orders.database).read().topics] == ["orders"]


def test_an_event_that_is_transferred_while_it_is_read_is_counted_once(
    orders: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(orders, "orders", 1)
    with orders.database.transaction() as connection:
        orders.publisher.publish(Publication("orders", b"", partition=0), connection=connection)
    readable = storage_metrics.LogMetrics.readable

    def transferred_before(*given: Any) -> list[str]:
        monkeypatch.undo()
        assert orders.transfer.run_once()
        return readable(*given)

    monkeypatch.setattr(storage_metrics.LogMetrics, "readable", transferred_before)
    (topic,) = FiguresReader(orders.database).read().topics
    assert (topic.published, topic.transferred, topic.buffered) == (2, 1, 1)


def test_a_topic_whose_log_may_not_be_read_is_left_out_with_its_consumers_and_claims(
    orders: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role with grants of its own may read all consumers, and some logs."""
    orders.registry.register_topic(Topic("payments")).register_consumer(Consumer("payments", "auditor"))
    publish(orders, "orders", 1)
    assert isinstance(orders.claims.claim("orders", "auditor", owner="me"), Claim)
    monkeypatch.setattr(storage_metrics.LogMetrics, "readable", lambda *_: ["payments"])
    found = FiguresReader(orders.database).read()
    assert {each.topic for part in (found.topics, found.partitions, found.claims) for each in part} == {"payments"}


def test_many_scrapers_at_once_and_soon_after_cost_one_reading(
    orders: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, go = [], threading.Event()
    read = FiguresReader.read

    def slowly(reader: FiguresReader) -> object:
        readings.append(1)
        assert go.wait(60)
        return read(reader)

    monkeypatch.setattr(FiguresReader, "read", slowly)
    collector = PlatformCollector(orders, interval=3600)
    found: list[Scrape] = []
    threads = [threading.Thread(target=lambda: found.append(Scrape(collector))) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    found.append(Scrape(collector))
    assert len(readings) == 1
    assert [each("eventsql_up") for each in found] == [1] * 9


def test_a_database_that_does_not_answer_is_down_for_the_scrape_and_comes_back(
    orders: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, read = threading.Event(), FiguresReader.read

    def hanging(reader: FiguresReader) -> object:
        assert go.wait(60)
        return read(reader)

    monkeypatch.setattr(FiguresReader, "read", hanging)
    collector = PlatformCollector(orders)
    with monkeypatch.context() as patched:
        patched.setattr("eventsql_orchestration.metrics.collector.PATIENCE", 0.01)
        down = Scrape(collector)
    assert [(each.name, each.value) for each in down.samples] == [("eventsql_up", 0)]
    go.set()
    (readings,) = collector._readings.values()
    assert readings.latest(60) is not None
    assert Scrape(collector)("eventsql_up") == 1


def test_each_shard_has_its_name_and_one_scrape_waits_for_all(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsns, latest, waits = databases(3), Readings.latest, list[float]()

    def after_a_second(readings: Readings[Any], seconds: float) -> Any:
        waits.append(seconds)
        return latest(readings, waiting.PATIENCE)

    def up(*given: str) -> dict[str, float]:
        with EventSQL(*given, transfer=False) as platform:
            samples = Scrape(PlatformCollector(platform)).samples
        return {each.labels["shard"]: each.value for each in samples if each.name == "eventsql_up"}

    monkeypatch.setattr(Readings, "latest", after_a_second)
    clock = SimpleNamespace(monotonic=lambda: float(len(waits)))
    monkeypatch.setattr("eventsql_orchestration.metrics.collector.time", clock)
    with EventSQL(*dsns, transfer=False) as platform:
        names = {str(shard.name): 1.0 for shard in platform.open().shards}
    assert up(*dsns) == names
    assert waits == [PATIENCE, PATIENCE - 1, PATIENCE - 2]
    # A database has its figures although another shard of its set is not named.
    assert list(up(*dsns[:2]).values()) == [1, 1]


def test_a_database_that_cannot_be_reached_is_down_after_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    read, attempts = FiguresReader._read, list[FiguresReader]()

    def attempt(reader: FiguresReader) -> object:
        attempts.append(reader)
        return read(reader)

    monkeypatch.setattr(FiguresReader, "_read", attempt)
    with EventSQL("postgresql://someone@127.0.0.1:1/nowhere", transfer=False) as nowhere:
        # The wait for the server is the driver's.
        assert [(each.name, each.value) for each in Scrape(PlatformCollector(nowhere)).samples] == [("eventsql_up", 0)]
    assert len(attempts) == 1


def test_a_reader_sees_all_topics_and_a_reader_of_one_topic_sees_that_one(owner: EventSQL, as_: As) -> None:
    publish(owner, "orders", 2)
    everything = Scrape(PlatformCollector(as_("reader")))
    assert everything("eventsql_events_published_total", topic="orders") == 2
    assert everything("eventsql_consumer_lag_events", topic="orders", consumer="mailer") == 2
    assert everything("eventsql_events_published_total", topic="payments") == 0
    one = Scrape(PlatformCollector(as_("reader_orders")))
    assert one("eventsql_consumer_lag_events", consumer="mailer") == 2
    assert {each.labels["topic"] for each in one.samples if "topic" in each.labels} == {"orders"}


@pytest.mark.parametrize("interval", [0, -1, float("inf"), float("nan"), "10"])
def test_an_invalid_interval_is_refused(platform: EventSQL, interval: float) -> None:
    with pytest.raises(ValidationError):
        PlatformCollector(platform, interval=interval)
