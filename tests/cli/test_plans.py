"""A command that loses something, or lets it happen again, only says what it would do, unless --execute is given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.database import Connection
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.store import Change, RecordedChange, SubscriptionOptions
from eventsql_orchestration.topics.positions import Earliest
from eventsql_orchestration.views import Timeline, ViewFeed, Views
from tests.boundary import face
from tests.cli.conftest import Run

VERBS = {
    "close", "delete", "dismiss", "drop", "erase", "give-up", "purge", "redrive", "replay", "retain", "seek",
}  # fmt: skip
"""The names of commands that lose something, or let something happen again."""

PLANNED = {
    "backfill delete": "orders mailer may",
    "capture drop": "basket orders",
    "consumer delete": "orders mailer",
    "dlt dismiss": "orders",
    "dlt redrive": "orders",
    "queue delete": "jobs --force",
    "queue erase": "jobs --key a",
    "queue purge": "jobs",
    "queue redrive": "jobs",
    "seek": "orders mailer --to-latest",
    "store close": "order 1",
    "store dismiss": "printer",
    "store replay": "printer",
    "topic delete": "orders --force",
    "topic erase": "orders --key a",
    "view drop": "steps",
    "view give-up": "steps",
    "view retain": "",
}
"""Commands with their arguments, in the database of `prepare`."""

JSON = {"dlt dismiss", "dlt redrive", "queue erase", "seek", "topic erase", "view retain"}
"""The commands of `PLANNED` that have --json."""

ELSEWHERE = {
    "backfill run": "test_backfill.py",
    "roles drop": "tests/roles/test_commands.py",
    "shard add": "tests/shards/test_commands.py",
    "topic compact": "tests/maintenance/test_compaction.py",
    "topic retain": "test_registry.py",
}
"""Commands whose plans other tests compare with what they do."""


def refuse(_change: RecordedChange, _connection: Connection) -> None:
    raise ValueError("out of paper")


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.publisher.publish_all([Publication("orders", b"1", key="a")] * 3)
    letter = {"dlt_topic": "orders", "dlt_event_id": "1", "dlt_consumer": "mailer", "dlt_attempts": "1"}
    platform.publisher.publish(Publication("orders_dlt", b"1", key="a", metadata=letter))
    platform.transfer.run_once()
    backfills = Backfills(platform.shards)
    backfills.register(backfills.plan("orders", "mailer", ReplayRange(Earliest())), "may")

    jobs = Queue(platform, "jobs", max_receives=1)
    jobs.send(b"1")
    for _ in range(2):
        for message in jobs.receive():
            jobs.release(message)
    jobs.send(b"2", key="a")

    store = platform.store
    store.append("order", "1", [Change("placed", {})], expected_version="any")
    once = SubscriptionOptions(max_attempts=1)
    store.subscribe("printer", refuse, options=once, background=False).run_once()

    class Steps(ViewFeed):
        view, topic, consumer = Timeline("steps", retention=timedelta(days=1)), "orders", "mailer"

        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            """Writes nothing."""

    views = Views(platform.database)
    views.declare(Timeline("steps"))
    with platform.database.transaction() as connection:
        views.timeline(Timeline("steps")).append(connection, [("1", {}, datetime(2024, 1, 1, tzinfo=UTC))])
    views.declare(Steps.view)
    views._rebuilding(Steps(), 10)._begin(partial=False)  # a killed rebuild ends here
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.basket (id integer PRIMARY KEY)")
    platform.capture("basket", "orders", snapshot=False)


def contents(dsn: str) -> list[object]:
    with psycopg.connect(dsn) as connection:
        return face.digest(connection)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        # A command that is loaded when it is called has its parameters then.
        loaded = command.make_context(name, [], resilient_parsing=True).command
        if isinstance(loaded, click.Group):
            yield from commands(loaded, (*path, name))
        else:
            yield " ".join((*path, name)), loaded


@pytest.mark.prepared.with_args(prepare)
@pytest.mark.parametrize("command", PLANNED)
def test_nothing_changes_before_execute(run: Run, dsn: str, command: str) -> None:
    arguments = [*command.split(), *PLANNED[command].split()]
    before = contents(dsn)
    planned = run(*arguments)
    assert planned.exit_code == 0, planned.output
    assert "run it again with --execute" in planned.stderr
    if command in JSON:
        again = run(*arguments, "--json")
        assert again.exit_code == 0, again.output
        assert again.stderr == planned.stderr
        assert json.loads(again.stdout)
    assert contents(dsn) == before

    executed = run(*arguments, "--execute")
    assert executed.exit_code == 0, executed.output
    assert "run it again" not in executed.stderr
    assert contents(dsn) != before


@pytest.mark.parametrize(
    "command", ["dlt dismiss orders", "dlt redrive orders", "queue purge jobs", "queue redrive jobs", "view retain"]
)
def test_a_plan_of_nothing_does_not_ask_for_execute(run: Run, platform: EventSQL, command: str) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("orders_dlt"))
    run("queue", "create", "jobs")
    planned = run(*command.split())
    assert planned.exit_code == 0, planned.output
    assert planned.stderr.startswith("eventsql: ")
    assert "--execute" not in planned.stderr


def test_every_command_that_loses_or_repeats_something_has_a_plan() -> None:
    found = dict(commands(main))
    planning = {name for name, each in found.items() if any("--execute" in option.opts for option in each.params)}
    assert planning == PLANNED.keys() | ELSEWHERE.keys()
    assert {name for name in PLANNED if any("--json" in option.opts for option in found[name].params)} == JSON
    assert {name for name in found if name.split()[-1] in VERBS} <= planning
    options = {option for each in found.values() for parameter in each.params for option in parameter.opts}
    assert {"--dry-run", "--yes"}.isdisjoint(options)
