"""The Python of README.md and of docs/ runs as it stands, and the commands of all documents are there."""

from __future__ import annotations

import importlib
import re
import urllib.request
from pathlib import Path
from typing import Any

import click
import dagster as dg
import psycopg
import pytest
from prometheus_client import REGISTRY

import eventsql_orchestration
from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.dagster import topic_key
from eventsql_orchestration.database import Connection
from eventsql_orchestration.queue import Queue, QueueDepth
from eventsql_orchestration.store import Change, RecordedChange, SubscriptionOptions
from tests.documents import DAGSTER, REPOSITORY, examples, play
from tests.shards.conftest import Databases, databases
from tests.views.conftest import SKETCHES

__all__ = ["databases"]

README = REPOSITORY / "README.md"
SERVICES = REPOSITORY / "docs" / "services.md"
DOCUMENTS = (README, *sorted((REPOSITORY / "docs").glob("*.md")))


def test_the_example_of_a_service_publishes_and_consumes_each_event_once(dsn: str) -> None:
    play(examples(README)[0], localhost=dsn)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT id FROM account").fetchall() == [(43,)]
        rows = connection.execute("SELECT account, count(*) FROM mail GROUP BY account").fetchall()
    assert dict(rows) == {str(number): 2 if number in {42, 43} else 1 for number in range(1_000)}


def test_the_publishers_of_the_guide_for_services_publish_each_order_and_its_consumer_gets_each(
    dsn: str, platform: EventSQL
) -> None:
    # Get started has made this consumer in the same database, and nobody runs it now.
    platform.registry.register_topic(Topic("order_placed", 4)).register_consumer(Consumer("order_placed", "stock"))
    outboxes, gathering, consumer, *_ = examples(SERVICES)
    play(outboxes, localhost=dsn)
    assert len(play(gathering, localhost=dsn)["placed"]) == 4
    platform.transfer.run_once()
    orders = ["11", "12", "13", "21", "22", "23", "24"]
    assert sorted(event.key or "" for event in platform.reader.read("order_placed")) == orders
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT id FROM shop_order ORDER BY id").fetchall() == [(12,), (13,)]

    play(consumer, localhost=dsn)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT * FROM mail ORDER BY 1").fetchall() == [(order,) for order in orders]


def test_the_example_of_a_command_answers_it_with_an_event(dsn: str, platform: EventSQL) -> None:
    [example] = examples(SERVICES, "document_generated")
    play(example, localhost=dsn)
    platform.transfer.run_once()
    assert [event.key for event in platform.reader.read("document_generated")] == ["7"]


def test_the_handler_that_awaits_runs_its_coroutines_in_the_event_loop(dsn: str, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("order_placed", 2))
    platform.publisher.publish_all([Publication("order_placed", b"", key=str(n)) for n in range(20)])
    platform.transfer.run_once()
    [example] = examples(SERVICES, "run_coroutine_threadsafe")
    assert sorted(play(example, localhost=dsn)["notified"]) == sorted(map(str, range(20)))


def test_the_example_of_a_script_handles_all_events_that_wait_and_ends(
    dsn: str, platform: EventSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    platform.registry.register_topic(Topic("order_placed", 1))
    platform.publisher.publish_all([Publication("order_placed", b"")] * 1_001)
    [example] = examples(SERVICES, '"nightly"')
    play(example, localhost=dsn)
    assert capsys.readouterr().out == "1000 orders\n1 orders\n"


def test_the_example_of_a_test_passes(platform: EventSQL) -> None:
    [example] = examples(SERVICES, "test_each_order_is_counted_once")
    play(example)["test_each_order_is_counted_once"](platform)


def test_the_example_of_a_seek_hands_the_events_of_the_last_hour_to_a_consumer_that_began_at_the_end(
    dsn: str, platform: EventSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    platform.registry.register_topic(Topic("order_placed", 1))
    for kind in ("return", "sale"):
        platform.publisher.publish(Publication("order_placed", kind.encode(), metadata={"kind": kind}))
    platform.transfer.run_once()
    [example] = examples(SERVICES, "seeker.plan")
    play(example, localhost=dsn)
    assert capsys.readouterr().out == "0 2 0 2 0\n"

    seen: list[bytes | None] = []
    platform.consumers.consume_once("order_placed", "returns", lambda events, _: seen.extend(e.value for e in events))
    assert seen == [b"return"]


def test_the_example_of_dead_letters_shapes_them_and_redrives_them(
    dsn: str, platform: EventSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    platform.registry.register_topic(Topic("order_placed")).register_topic(Topic("order_placed_dlt"))
    platform.registry.register_consumer(Consumer("order_placed", "mailer"), max_attempts=1)
    platform.publisher.publish(Publication("order_placed", b"", key="7"))
    platform.transfer.run_once()

    def fail(*_: object) -> None:
        raise ValueError("no address")

    [example] = examples(SERVICES, "with_team")
    shape = play(example, localhost=dsn)["with_team"]
    platform.dead_letters.configure(shape)
    platform.consumers.consume_once("order_placed", "mailer", fail)
    platform.transfer.run_once()
    [letter] = platform.dead_letters.list("order_placed")
    assert letter.metadata["team"] == "shop"

    assert play(example, localhost=dsn)["redriven"] == 1
    assert capsys.readouterr().out == f"{letter.id} 7 no address\n"


def test_the_example_of_a_consumer_is_a_code_location(
    dsn: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    defs: dg.Definitions = play(examples(README)[1])["defs"]
    assert defs.resolve_job_def("register").execute_in_process().success
    platform.publisher.publish(Publication("account_created", b"{}", key="42"))
    platform.transfer.run_once()
    assert defs.resolve_job_def("consume_ledger").execute_in_process().success
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT account FROM ledger").fetchall() == [("42",)]


def test_the_example_of_a_job_that_follows_a_consumer_requests_it_after_each_run(
    dsn: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    [example] = examples(DAGSTER, "make_report")
    defs: dg.Definitions = play(example)["defs"]
    assert defs.resolve_asset_graph().get(topic_key("order_placed")).parent_keys == {dg.AssetKey("web_shop")}

    with dg.DagsterInstance.ephemeral() as instance:
        assert defs.resolve_job_def("register").execute_in_process(instance=instance).success
        sensor = defs.resolve_sensor_def("after_sales")

        def tick(cursor: str | None) -> Any:
            with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
                return sensor.evaluate_tick(context)

        assert not tick(None).run_requests
        platform.publisher.publish(Publication("order_placed", b"tea"))
        platform.transfer.run_once()
        assert defs.resolve_job_def("consume_sales").execute_in_process(instance=instance).success
        after = tick(None)
        assert len(after.run_requests) == 1
        assert not tick(after.cursor).run_requests


def test_the_example_of_a_backfill_has_the_jobs_that_the_text_names(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    location: dg.Definitions = play(examples(REPOSITORY / "docs" / "backfills.md")[0])["defs"]
    for job in ("backfill_order_status", "plan_order_status_backfill"):
        assert location.resolve_job_def(job).name == job


def test_the_example_of_shards_publishes_on_one_of_them_and_consumes_there(
    databases: Databases, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = databases(2)
    play(examples(REPOSITORY / "docs" / "shards.md")[0], one=one, two=two)
    shown = capsys.readouterr().out
    assert "shard='shard-1'" in shown
    assert "shard='shard-2'" in shown


def test_the_example_of_traces_publishes_and_handles(dsn: str) -> None:
    names = play(examples(REPOSITORY / "docs" / "tracing.md")[0], localhost=dsn)
    with names["platform"] as platform:
        platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
        names["publisher"].publish(Publication("orders", b"tea"))
        platform.transfer.run_once()
        assert platform.consumers.consume_once("orders", "mailer", names["send_mail"]) == 1
        [event] = platform.reader.read("orders")
    assert event.metadata["traceparent"].startswith("00-")


def test_the_example_of_metrics_serves_them(dsn: str) -> None:
    known = set(REGISTRY._collector_to_names)
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders"))
        platform.publisher.publish(Publication("orders", b""))
        # The count of an empty log may be too high while its first batch is moved.
        platform.transfer.run_once()
    names = play(examples(REPOSITORY / "docs" / "metrics.md")[0], localhost=dsn)
    try:
        names["publisher"].publish(Publication("orders", b""))

        def scraped() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{names['server'].server_port}", timeout=60) as answer:
                return str(answer.read().decode())

        assert 'eventsql_publish_seconds_count{outcome="done",topic="orders"} 1.0' in scraped()
        # The database may have been read before the second event.
        assert re.search(r'eventsql_events_published_total\{shard="",topic="orders"\} [12].0', scraped())
    finally:
        for collector in set(REGISTRY._collector_to_names) - known:
            REGISTRY.unregister(collector)
        names["server"].shutdown()
        names["server"].server_close()
        names["thread"].join()
        names["platform"].close()


QUEUES = REPOSITORY / "docs" / "queues.md"
EVENT_STORE = REPOSITORY / "docs" / "event_store.md"


def test_the_example_of_a_queue_does_each_piece_of_work_once(dsn: str) -> None:
    assert play(examples(QUEUES)[0], localhost=dsn)["left"] == QueueDepth(visible=0, invisible=1)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT image FROM thumbnail").fetchall() == [("cat.png",)]


def test_the_example_of_workers_handles_each_message_once(dsn: str) -> None:
    play(examples(QUEUES)[1], localhost=dsn)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT customer FROM invoice ORDER BY 1").fetchall() == [("ann",), ("bob",)]


def test_the_example_of_a_topic_consumed_as_a_queue_handles_its_event(
    dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    play(examples(QUEUES)[2], localhost=dsn)
    assert capsys.readouterr().out == "cat 7\n"


def test_the_example_of_an_aggregate_lets_one_of_two_decisions_stand(dsn: str, platform: EventSQL) -> None:
    names = play(examples(EVENT_STORE)[0], localhost=dsn)
    assert [names[each].balance for each in ("mine", "other", "earlier")] == [30, 30, 100]
    assert names["other"].version == 2
    platform.transfer.run_once()
    assert [event.key for event in platform.reader.read("money_withdrawn")] == ["42"]


def test_the_example_of_typed_events_reads_what_it_stored(dsn: str) -> None:
    names = play(examples(EVENT_STORE)[1], localhost=dsn)
    assert names["stored"] == [names["Deposited"](cents=250, currency="EUR")]
    # A platform that is used after its closing connects anew.
    with names["platform"]:
        assert names["wallets"].load("7").cents == 250


def test_the_example_of_a_subscription_writes_each_letter_once(dsn: str, platform: EventSQL) -> None:
    names = play(examples(EVENT_STORE)[2], localhost=dsn)
    # The example ends as soon as it has begun; the next subscriber goes on.
    platform.store.subscribe("mailer", names["write_letter"], background=False).run_once()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT * FROM public.letter").fetchall() == [("43", 1)]


def test_the_example_of_a_projection_counts_what_is_stored(dsn: str) -> None:
    assert play(examples(EVENT_STORE)[3], localhost=dsn)["applied"] == 2
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT * FROM public.payment").fetchall() == [("44", 2)]


def test_the_example_of_an_erased_aggregate_leaves_the_others_in_their_order(dsn: str, platform: EventSQL) -> None:
    def fail(change: RecordedChange, _connection: Connection) -> None:
        if change.aggregate_id == "4711":
            raise ValueError("no such address")

    store = platform.store
    for customer in ("1", "4711", "archived"):
        store.append("customer", customer, [Change("joined", {"id": customer})], expected_version=0)
    store.save_snapshot("customer", "4711", 1, {"id": "4711"})
    store.close_stream("customer", "archived")
    store.archive_stream("customer", "archived")
    subscription = store.subscribe("mailer", fail, options=SubscriptionOptions(max_attempts=1), background=False)
    while subscription.run_once().more:
        pass
    assert [letter.aggregate_id for letter in store.dead_letters("mailer")] == ["4711"]

    rows = play(examples(EVENT_STORE)[6], localhost=dsn)["ROWS"]
    with platform.database.connection() as connection:
        for table, name in rows.items():
            connection.execute(f"DELETE FROM eventsql.{table} WHERE {name} = 'archived'".encode())
            assert connection.execute(f"SELECT FROM eventsql.{table} WHERE {name} <> '1'".encode()).fetchall() == []
    assert store.dead_letters("mailer") == []
    assert store.append("customer", "4711", [Change("joined", {})], expected_version="none") == 1
    assert [(each.aggregate_id, each.version) for each in store.read_all()] == [("1", 1), ("4711", 1)]
    (lag,) = store.subscriptions()
    assert lag.waiting == 1


def test_the_example_of_views_finds_what_was_published(dsn: str) -> None:
    names = play(examples(REPOSITORY / "docs" / "views.md")[0], localhost=dsn)
    assert (names["way"], names["moved"], names["grams"]) == (["Gdansk", "Lodz", "Krakow"], 3, 750)
    assert [found.line for found in names["found"]] == ["arrived at Krakow", "arrived at Lodz", "arrived at Gdansk"]

    query = (REPOSITORY / "docs" / "views.md").read_text(encoding="utf-8").split("```sql\n")[1].partition("```")[0]
    with psycopg.connect(dsn) as connection:
        hours = connection.execute(query.encode()).fetchall()
    assert [sum(filter(None, column)) for column in zip(*(row[1:] for row in hours), strict=True)] == [1, 1, 750]


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_the_example_of_sketches_counts_a_visitor(dsn: str) -> None:
    names = play(examples(REPOSITORY / "docs" / "views.md")[1], localhost=dsn)
    assert (names["visitors"].estimate, names["times"].at(0.5)) == (1, 12)


def test_the_example_of_a_rebuild_has_what_was_published(dsn: str) -> None:
    names = play(examples(REPOSITORY / "docs" / "views.md")[2], localhost=dsn)
    assert names["compared"].equal
    with names["platform"]:
        assert [(stop.dimensions, stop.count) for stop in names["stops"].read()] == [({"place": "Lodz"}, 1)]


def test_the_example_of_a_table_goes_on_where_it_was(dsn: str) -> None:
    assert play(examples(EVENT_STORE)[5], localhost=dsn)["prices"] == {"tea": 4}
    with psycopg.connect(dsn) as connection:
        connection.execute("INSERT INTO public.price_change (item, price) VALUES ('rice', 2)")
    again = play(examples(EVENT_STORE)[5].replace("('tea', 3), ('tea', 4)", "('salt', 1)"), localhost=dsn)
    assert again["prices"] == {"rice": 2, "salt": 1}


def test_the_example_of_a_capture_has_the_row_and_its_change(dsn: str) -> None:
    names = play(examples(REPOSITORY / "docs" / "change_capture.md")[0], localhost=dsn)
    assert [(change["op"], change["after"]["status"]) for change in names["changes"]] == [("r", "new"), ("u", "paid")]


def test_the_statement_that_takes_over_a_table_publishes_its_rows_in_their_order(dsn: str, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE messages (seq serial, key text, data text)")
        connection.execute("INSERT INTO messages (key, data) VALUES ('a', 'one'), ('b', 'zwölf'), ('a', 'two')")
        connection.execute("UPDATE messages SET data = 'eins' WHERE seq = 1")
        connection.execute(statement(REPOSITORY / "docs" / "comparison.md", "FROM messages").encode())
    platform.transfer.run_once()
    published = [(event.key, event.value.decode()) for event in platform.reader.read("orders")]
    assert published == [("a", "eins"), ("b", "zwölf"), ("a", "two")]


def test_the_statement_that_moves_a_queue_of_pgmq_keeps_the_order_and_the_delays_of_its_messages(
    dsn: str, platform: EventSQL
) -> None:
    moved = Queue(platform, "mails")
    moved.definition()
    statement_of_move = statement(REPOSITORY / "docs" / "comparison.md", "pgmq").encode()
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE SCHEMA pgmq")
        connection.execute(
            "CREATE TABLE pgmq.q_mails (msg_id bigint GENERATED ALWAYS AS IDENTITY, read_ct integer DEFAULT 0, "
            "vt timestamptz NOT NULL, message jsonb)"
        )
        connection.execute(
            "INSERT INTO pgmq.q_mails (vt, message) SELECT now() + later, message FROM (VALUES "
            "(interval '0', jsonb '{\"to\": \"ann\"}'), ('1 hour', '{\"to\": \"bob\"}'), ('-1 hour', '7')) "
            "AS sent (later, message)"
        )
        connection.execute(statement_of_move)
        assert connection.execute("SELECT FROM pgmq.q_mails").fetchall() == []
        assert connection.execute(statement_of_move).fetchall() == []
    assert [message.body for message in moved.receive(max_messages=10)] == [b'{"to": "ann"}', b"7"]
    assert moved.statistics().delayed == 1


def statement(document: Path, mark: str) -> str:
    """The SQL of a document that has the text `mark`."""
    [found] = [sql for sql in re.findall(r"```sql\n(.*?)```", document.read_text("utf-8"), re.DOTALL) if mark in sql]
    return str(found)


def lines(document: Path) -> list[list[str]]:
    """The words of each `eventsql …` that a document shows, without remarks."""
    shown = re.findall(r"(?:^|`|\$ |\.venv/bin/)eventsql ([a-z-][^`|)\n]*)", document.read_text("utf-8"), re.MULTILINE)
    return [line.partition("  #")[0].split() for line in shown]


def understood(words: list[str]) -> bool:
    """Whether the program has these commands and options; an ellipsis stands for anything."""
    command: click.Command = main
    left = iter(words)
    for word in left:
        if word == "--help":
            return True
        if word.startswith("-"):
            option = next((each for each in command.params if word.partition("=")[0] in each.opts), None)
            if not isinstance(option, click.Option):
                return False
            if not option.is_flag and "=" not in word:
                next(left, None)
        elif "…" in word:
            return True
        elif isinstance(command, click.Group):
            # A backfill is run where nothing else is said.
            found = command.commands.get(word) or command.commands.get("run")
            if found is None:
                return False
            # What is loaded when it is called stands for itself only then.
            command = found.make_context(word, [], resilient_parsing=True).command
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_command_and_option_that_a_document_shows_exists(document: Path) -> None:
    assert [words for words in lines(document) if not understood(words)] == []


def test_the_reference_of_the_library_has_every_public_name() -> None:
    page = (REPOSITORY / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. (?:auto\w+|py:data):: (?:\w+\.)*(\w+)$", page, re.MULTILINE)
    assert set(eventsql_orchestration.__all__) <= set(named)


def test_the_reference_of_the_commands_has_the_options_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    page = (REPOSITORY / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    module, name = re.findall(r"click:: (\S+):(\S+)", page)[0]
    program = getattr(importlib.import_module(module), name)
    assert list(program.commands) == list(main.commands)
    for command in program.commands.values():
        assert isinstance(command, click.Group) or command.params, command.name
    assert "--execute" in {flag for each in program.commands["seek"].params for flag in each.opts}
