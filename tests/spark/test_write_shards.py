"""A write over shards: each key on its shard, and each batch once, whatever process dies at any of the commits.

A commit is stopped by a trigger of the test's that waits for a lock, in the transaction or at its end.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql.types import StringType, StructField, StructType

from eventsql_orchestration import Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.client import admin
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PublicationUnfinishedError,
    RedefinitionError,
    ShardPendingError,
    ShardSetError,
)
from eventsql_orchestration.publishing import staged_blocks
from eventsql_orchestration.publishing import two_phase_participant as parts
from eventsql_orchestration.publishing.staged_blocks import LEAST_BY_BLOCKS
from eventsql_orchestration.publishing.two_phase_participant import PublicationPart, TwoPhaseParticipant
from eventsql_orchestration.shards import add_shard
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.two_phase_coordinator import TwoPhaseCoordinator
from eventsql_orchestration.spark import commit_protocol as publication
from eventsql_orchestration.spark import write_targets
from eventsql_orchestration.spark.commit_log import Batch, portions_of
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import WriteOptions
from eventsql_orchestration.spark.staging import Attempt, Share, StreamBatch, stage
from eventsql_orchestration.spark.writer import BatchWriter, Staged
from tests.conftest import Administrator, Prepared, own_server
from tests.shard_keys import shard_of_key
from tests.shards.conftest import Databases, databases
from tests.spark.spreading import publish, rows, source_of, staged, start
from tests.spark.stopping import Stop, await_end_of_transactions, no_transactions, stopping
from tests.waiting import wait_until

__all__ = ["databases"]

NAMES = ["shard-1", "shard-2", "shard-3"]

FEW = 600
"""Events that are copied into the buffers, and not published as blocks."""

MANY = 3 * LEAST_BY_BLOCKS + 6_000
"""Enough for blocks on every shard."""


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", partitions=4))


@pytest.fixture
def dsns(databases: Databases, prepared: Prepared) -> list[str]:
    """Three shards with a topic; the events of a write lie on all of them."""
    return in_order(databases(3, prepared(prepare, databases=3)))


def made(dsns: list[str]) -> list[str]:
    """The same without a copy."""
    with EventSQL(*dsns, transfer=False) as platform:
        prepare(platform)
    return in_order(dsns)


def in_order(dsns: list[str]) -> list[str]:
    """Shards in the order of their names, which is another one than that of their URLs."""
    named = {}
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            row = connection.execute("SELECT eql_name FROM eventsql.shard").fetchone()
        assert row is not None
        named[row[0]] = dsn
    return [named[name] for name in sorted(named)]


@pytest.fixture
def platform(dsns: list[str]) -> Iterator[EventSQL]:
    with EventSQL(*dsns, transfer=False) as opened:
        yield opened


def kill_at(dsns: list[str], events: int, shard: int, step: str, *, at_commit: bool = False) -> None:
    """A write of events from 0 on, whose process is killed at a step on a shard."""
    with stopping(dsns[shard], step, at_commit=at_commit) as stop:
        process = start(dsns, 0, events)
        stop.await_reached()
        process.kill()
        process.join()
        stop.end_session()
    await_end_of_transactions(dsns)


class Writing:
    """A write of events from 0 on, in a thread, which waits at a step. `outcome` is what it gives or raises."""

    def __init__(self, dsns: list[str], stop: Stop) -> None:
        self.stop = stop
        self.outcome: object = None
        self._dsns = dsns
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        stop.await_reached()
        self.join = self._thread.join

    def _run(self) -> None:
        try:
            self.outcome = publish(self._dsns, 0, FEW)
        except EventSQLError as error:
            self.outcome = error

    def end(self) -> None:
        self.stop.let_go()
        self.join()


@contextmanager
def writing(dsns: list[str], shard: int, step: str, *, at_commit: bool = False) -> Iterator[Writing]:
    with stopping(dsns[shard], step, at_commit=at_commit) as stop:
        write = Writing(dsns, stop)
        yield write
        write.end()


def events_of(platform: EventSQL) -> list[int]:
    """The numbers of all events, each of which lies on the shard of its key."""
    platform.transfer.run_once()
    found = []
    for shard in platform.shards:
        events = shard.reader.read("orders")
        assert {shard_of_key(str(event.key), names_of(platform)) for event in events} <= {str(shard.name)}
        found += [int(event.value) for event in events]
    return sorted(found)


def names_of(platform: EventSQL) -> list[str]:
    return [str(shard.name) for shard in platform.shards]


def check_nothing_is_left(dsns: list[str]) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM eventsql.spark_decision), "
                "(SELECT count(*) FROM eventsql.spark_part WHERE eql_published_at IS NULL), "
                "(SELECT count(*) FROM eventsql.event_buffer)"
            ).fetchone()
        assert row == (0, 0, 0)


def count(dsn: str, table: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("eventsql", table))
        ).fetchone()
    assert row is not None
    return int(row[0])


# What is published


@pytest.mark.parametrize("events", [FEW, MANY], ids=["few", "many"])
def test_a_batch_is_published_once_with_each_key_on_its_shard_and_in_order(
    platform: EventSQL, dsns: list[str], events: int
) -> None:
    assert publish(dsns, 0, events)
    assert not publish(list(reversed(dsns)), 0, events)
    assert events_of(platform) == list(range(events))
    for shard in platform.shards:
        numbers: dict[str, list[int]] = {}
        for event in shard.reader.read("orders"):
            numbers.setdefault(str(event.key), []).append(int(event.value))
            assert event.partition == platform.publisher.partition_of(event.as_publication())
        assert numbers
        assert all(found == sorted(found) for found in numbers.values())
    check_nothing_is_left(dsns)
    assert sum(count(dsn, "spark_staged_event") for dsn in dsns) == 0


# A driver that dies

UNDECIDED = {
    "before it is announced": (0, "INSERT ON eventsql.spark_decision", False),
    "while a part is prepared": (1, "INSERT ON eventsql.spark_part", True),
    "when all parts are prepared": (1, "UPDATE ON eventsql.spark_part", False),
    "with the deciding commit": (0, "INSERT ON eventsql.spark_publication", True),
}
DECIDED = {
    "with the commit on the second": (1, "UPDATE ON eventsql.spark_part", True),
    "with the commit on the third": (2, "UPDATE ON eventsql.spark_part", True),
    "before it is finished": (0, "DELETE ON eventsql.spark_decision", False),
}


@pytest.mark.parametrize(
    "step",
    [
        "with the deciding commit",
        pytest.param("before it is announced", marks=pytest.mark.nightly),
        pytest.param("while a part is prepared", marks=pytest.mark.nightly),
        pytest.param("when all parts are prepared", marks=pytest.mark.nightly),
    ],
)
def test_a_write_that_was_not_decided_is_not_published_and_the_next_one_is(
    platform: EventSQL, dsns: list[str], step: str
) -> None:
    shard, statement, at_commit = UNDECIDED[step]
    kill_at(dsns, FEW, shard, statement, at_commit=at_commit)
    assert events_of(platform) == []
    assert publish(dsns, FEW, FEW)
    assert events_of(platform) == list(range(FEW, 2 * FEW))
    # A publication that nobody can decide any more is given up by the next process.
    assert decisions_of(platform).finish() == []
    check_nothing_is_left(dsns)
    assert events_of(platform) == list(range(FEW, 2 * FEW))


@pytest.mark.parametrize(
    ("step", "events"),
    [
        ("with the commit on the second", FEW),
        pytest.param("with the commit on the second", MANY, marks=pytest.mark.nightly),
        pytest.param("with the commit on the third", FEW, marks=pytest.mark.nightly),
        pytest.param("before it is finished", FEW, marks=pytest.mark.nightly),
    ],
)
def test_a_write_that_was_decided_is_finished_by_the_next_one_from_what_was_decided(
    platform: EventSQL, dsns: list[str], step: str, events: int
) -> None:
    shard, statement, at_commit = DECIDED[step]
    kill_at(dsns, events, shard, statement, at_commit=at_commit)
    assert not publish(dsns, events, events // 2), "it has other events now, and was published before"
    check_parts_are_published(dsns)
    assert events_of(platform) == list(range(events))
    check_nothing_is_left(dsns)


@pytest.mark.nightly
def test_a_repartitioning_waits_for_a_driver_and_gives_up_what_a_dead_one_left_before_any_shard_changes(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "SUPERSEDED_SECONDS", 600.0)
    with stopping(dsns[1], "UPDATE ON eventsql.spark_part") as stop:
        process = start(dsns, 0, FEW)
        stop.await_reached()
        named = "batch 7 of writer 'nightly' is not finished: it is being published by process %d on .*, for [0-9]+ s"
        with pytest.raises(DatabaseBusyError, match=f"keeps its partitions on all shards: {named % process.pid}"):
            platform.repartitioner.repartition("orders", 5, timeout=0)
        process.kill()
        process.join()
        stop.end_session()
    await_end_of_transactions(dsns)
    assert {shard.registry.topic("orders").partitions for shard in platform.shards} == {4}
    assert platform.repartitioner.repartition("orders", 5, timeout=0) is not None
    assert {shard.registry.topic("orders").partitions for shard in platform.shards} == {5}
    assert publish(dsns, FEW, FEW)
    assert events_of(platform) == list(range(FEW, 2 * FEW))
    check_nothing_is_left(dsns)


@pytest.mark.parametrize(
    ("shard", "statement", "at_commit"),
    [
        pytest.param(1, "INSERT ON eventsql.spark_part", True, id="while it prepares", marks=pytest.mark.nightly),
        pytest.param(1, "UPDATE ON eventsql.spark_part", False, id="while it places", marks=pytest.mark.nightly),
        pytest.param(0, "INSERT ON eventsql.spark_publication", True, id="while it decides"),
    ],
)
def test_a_publication_of_a_live_driver_is_not_given_up(
    platform: EventSQL, dsns: list[str], shard: int, statement: str, *, at_commit: bool
) -> None:
    decisions = decisions_of(platform)
    with writing(dsns, shard, statement, at_commit=at_commit) as write:
        (left,) = decisions.finish()
        assert "it is being published by process" in left.reason
        if shard == 0:
            # Nor while it is being decided, whatever its age.
            (left,) = decisions.finish(abandoned_after=0)
            assert "was too busy" in left.reason
    assert write.outcome is True
    assert decisions.finish() == []
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_a_repartitioning_publishes_what_is_decided_first(platform: EventSQL, dsns: list[str]) -> None:
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    assert platform.repartitioner.repartition("orders", 5) is not None
    check_nothing_is_left(dsns)
    assert events_of(platform) == list(range(FEW))


def test_blocks_that_are_lost_after_they_were_prepared_publish_nothing(platform: EventSQL, dsns: list[str]) -> None:
    with writing(dsns, 1, "UPDATE ON eventsql.spark_part") as write, psycopg.connect(dsns[1]) as connection:
        connection.execute("DELETE FROM eventsql.spark_staged_event")
    assert isinstance(write.outcome, DatabaseError)
    assert events_of(platform) == []
    check_nothing_is_left(dsns)
    assert publish(dsns, 0, FEW)
    assert events_of(platform) == list(range(FEW))


def decisions_of(platform: EventSQL) -> TwoPhaseCoordinator:
    platform.open()
    return TwoPhaseCoordinator(lambda: {str(shard.name): shard for shard in platform.shards})


@pytest.mark.nightly
def test_a_part_whose_batch_took_place_elsewhere_is_given_up(platform: EventSQL, dsns: list[str]) -> None:
    """The process that gave the first attempt up left its parts. The second has no events on their shards."""
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part")
    first, *others = platform.open().shards
    (announced,) = TwoPhaseParticipant(first.database).announced()
    assert TwoPhaseParticipant(first.database).give_up(announced.id, timeout=1.0)
    with Publications(source_of(dsns)) as publications:
        attempts = [
            Attempt(each.id, tuple(share for share in each.shares if share.shard == first.name))
            for each in staged(publications, FEW, FEW)
        ]
        with first.database.connection() as connection:
            publications._logs[first.name].record(connection, Batch("nightly", 7, tuple(attempts)), uuid.uuid4())
        decisions = decisions_of(platform)
        assert [len(TwoPhaseParticipant(shard.database).open()) for shard in others] == [1, 1]
        assert decisions.finish() == []
        publications.discard(attempts)
    assert events_of(platform) == []
    check_nothing_is_left(dsns)
    assert platform.repartitioner.repartition("orders", 5, timeout=0) is not None


def test_a_part_of_a_batch_that_an_older_version_recorded_is_kept(platform: EventSQL, dsns: list[str]) -> None:
    assert publish(dsns, 0, FEW)
    with psycopg.connect(dsns[0]) as connection:
        connection.execute("UPDATE eventsql.spark_publication SET eql_id = NULL")
    with psycopg.connect(dsns[1]) as connection:
        connection.execute("UPDATE eventsql.spark_part SET eql_published_at = NULL")
        # Nor is the part of another attempt at this batch published: nobody knows which of them took place.
        connection.execute(
            "INSERT INTO eventsql.spark_part (eql_id, eql_shard, eql_writer, eql_batch, eql_attempts, eql_events) "
            "SELECT gen_random_uuid(), eql_shard, eql_writer, eql_batch, eql_attempts, eql_events "
            "FROM eventsql.spark_part"
        )
    left = decisions_of(platform).finish(abandoned_after=0)
    assert [(each.decided, each.shards) for each in left] == [(None, ("shard-2",))] * 2
    assert len(TwoPhaseParticipant(platform.shards[1].database).open()) == 2


@pytest.mark.nightly
def test_a_part_that_was_given_up_before_an_older_version_published_its_batch_goes(
    platform: EventSQL, dsns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part")
    first, *others = platform.open().shards
    (announced,) = TwoPhaseParticipant(first.database).announced()
    assert TwoPhaseParticipant(first.database).give_up(announced.id, timeout=1.0)
    with Publications(source_of(dsns)) as publications:
        attempts = staged(publications, 0, FEW)
        part = PublicationPart(uuid.uuid4(), "shard-1", "nightly", 7)
        portions = {str(shard): portion for shard, portion in portions_of(attempts).items()}
        # It looks for nothing that was given up.
        publications._commit_on_all(
            part,
            publications._logs["shard-1"],
            Batch("nightly", 7, tuple(attempts)),
            {shard: portion for shard, portion in portions.items() if shard != "shard-1"},
            portions["shard-1"],
        )
    TwoPhaseParticipant(first.database).finish(part.id)
    with psycopg.connect(dsns[0]) as connection:
        connection.execute("UPDATE eventsql.spark_publication SET eql_id = NULL")
    assert [len(TwoPhaseParticipant(shard.database).open()) for shard in others] == [1, 1]
    assert decisions_of(platform).finish() == []
    assert "a part of batch 7 of writer 'nightly' is given up" in caplog.text
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


@pytest.mark.nightly
@pytest.mark.parametrize("outcome", ["decided", "given up"])
def test_a_publication_that_ends_while_it_is_looked_at_is_treated_by_its_outcome(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Its owner decides it and is killed, or somebody else gives it up, after it was read as announced."""
    decisions, give_up = decisions_of(platform), TwoPhaseParticipant.give_up
    step = "UPDATE ON eventsql.spark_part"
    kill_at(dsns, FEW, 1, step, at_commit=outcome == "decided")
    first = TwoPhaseParticipant(platform.shards[0].database)
    (announced,) = first.announced()
    if outcome == "given up":
        assert give_up(first, announced.id, timeout=1.0)
    looked_at = replace(announced, decided=False, deserted=True)
    monkeypatch.setattr(
        TwoPhaseParticipant, "announced", lambda parts: [looked_at] if parts._database is first._database else []
    )
    if outcome == "decided":
        with psycopg.connect(dsns[1]) as lock:
            lock.execute("SELECT FROM eventsql.spark_part FOR UPDATE")
            (left,) = decisions.finish()
        assert (left.decided, left.shards) == (True, ("shard-2",)), "a later batch waits for it"
    assert decisions.finish() == []
    monkeypatch.undo()
    check_nothing_is_open(dsns)
    assert events_of(platform) == (list(range(FEW)) if outcome == "decided" else [])


def test_a_publication_is_not_given_up_right_after_its_announcement(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions, announce = decisions_of(platform), TwoPhaseParticipant.announce

    def announce_and_look(*given: Any) -> None:
        announce(*given)
        assert [left.decided for left in decisions.finish()] == [False]

    monkeypatch.setattr(TwoPhaseParticipant, "announce", announce_and_look)
    assert publish(dsns, 0, FEW)
    assert events_of(platform) == list(range(FEW))


def test_a_publication_that_begins_or_ends_between_two_looks_is_left_alone(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = decisions_of(platform)
    with writing(dsns, 0, "INSERT ON eventsql.spark_publication", at_commit=True) as write:
        parts = {shard.database: TwoPhaseParticipant(shard.database).open() for shard in platform.shards}
        with monkeypatch.context() as before:
            # It is announced, and has prepared its parts, after it was looked for announcements.
            before.setattr(TwoPhaseParticipant, "announced", lambda _parts: [])
            assert [left.reason for left in decisions.finish()] == ["it is being published"]
    assert write.outcome is True
    # Its parts are published after they were read as open.
    monkeypatch.setattr(TwoPhaseParticipant, "open", lambda found: parts[found._database])
    assert decisions.finish() == []
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_a_write_that_others_finish_before_it_finds_out_was_the_first(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions, give_up = decisions_of(platform), TwoPhaseParticipant.give_up

    def finish_before(parts: TwoPhaseParticipant, publication: uuid.UUID, *, timeout: float) -> bool:
        assert decisions.finish() == []
        return give_up(parts, publication, timeout=timeout)

    monkeypatch.setattr(TwoPhaseParticipant, "give_up", finish_before)
    with writing(dsns, 1, "UPDATE ON eventsql.spark_part", at_commit=True) as write:
        write.stop.end_session()
    assert write.outcome is True
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_a_part_that_is_published_already_is_not_published_again(
    platform: EventSQL, dsns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert publish(dsns, 0, FEW)
    with psycopg.connect(dsns[1]) as connection:
        (part,) = connection.execute("SELECT eql_id FROM eventsql.spark_part").fetchone() or (None,)
    assert isinstance(part, uuid.UUID)
    assert TwoPhaseParticipant(platform.shards[1].database).publish_decided(part, timeout=1.0)
    assert caplog.messages == []
    assert events_of(platform) == list(range(FEW))


def test_a_part_that_comes_back_with_a_backup_is_reported_and_kept(
    platform: EventSQL, dsns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert publish(dsns, 0, FEW)
    decisions = decisions_of(platform)
    assert decisions.finish() == []
    with psycopg.connect(dsns[1]) as connection:
        connection.execute("UPDATE eventsql.spark_part SET eql_published_at = NULL")
    (left,) = decisions.finish(abandoned_after=0)
    assert (left.writer, left.batch, left.decided, left.shards) == ("nightly", 7, None, ("shard-2",))
    assert "restore of one of the databases" in str(left)
    with psycopg.connect(dsns[0]) as connection:
        connection.execute("DELETE FROM eventsql.spark_publication")
    assert decisions.finish() == []
    assert "a part of batch 7 of writer 'nightly' is given up: shard 'shard-1' does not know its" in caplog.text
    check_nothing_is_open(dsns)


def test_a_decided_part_that_a_shard_has_lost_is_an_error_in_the_log(
    platform: EventSQL, dsns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As if its standby was promoted, and had not got the last commits."""
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    with psycopg.connect(dsns[1]) as connection:
        connection.execute("DELETE FROM eventsql.spark_part")
    assert decisions_of(platform).finish() == []
    lost = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert ["on shard 'shard-2', which has lost them" in record.getMessage() for record in lost] == [True]


def check_parts_are_published(dsns: list[str]) -> None:
    for dsn in dsns[1:]:
        with psycopg.connect(dsn) as connection:
            row = connection.execute("SELECT count(*), count(eql_published_at) FROM eventsql.spark_part").fetchone()
        assert row == (1, 1)


@pytest.mark.parametrize("finisher", ["a transfer", "another write"])
def test_a_write_that_was_decided_is_finished_by_others(platform: EventSQL, dsns: list[str], finisher: str) -> None:
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    # A sweep takes nothing that is decided, however old it is.
    with psycopg.connect(dsns[1]) as connection:
        connection.execute("UPDATE eventsql.spark_staged_event SET eql_created_at = now() - interval '3 days'")
    expected = list(range(FEW))
    if finisher == "another write":
        with Publications(source_of(dsns)) as publications:
            assert publications.publish("hourly", 0, staged(publications, FEW, FEW))
            publications.publish("hourly", 1, [])
        expected += range(FEW, 2 * FEW)
        check_nothing_is_open(dsns)
    assert events_of(platform) == expected
    check_nothing_is_left(dsns)


def check_nothing_is_open(dsns: list[str]) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(
                "SELECT count(*) FROM eventsql.spark_part WHERE eql_published_at IS NULL"
            ).fetchone()
        assert row == (0,)


def test_neither_a_sweep_nor_an_abort_takes_a_decided_part(platform: EventSQL, dsns: list[str]) -> None:
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    with psycopg.connect(dsns[1]) as connection:
        connection.execute("UPDATE eventsql.spark_staged_event SET eql_created_at = now() - interval '3 days'")
        row = connection.execute("SELECT eql_attempts FROM eventsql.spark_part").fetchone()
    assert row is not None
    staged_events = count(dsns[1], "spark_staged_event")
    with Publications(source_of(dsns)) as publications:
        publications._logs["shard-2"].sweep()
        # As Spark does where the commit fails, because a shard does not take its part.
        publications.discard([Attempt(attempt, (Share("shard-2", {}),)) for attempt in row[0]])
    assert count(dsns[1], "spark_staged_event") == staged_events > 0
    assert events_of(platform) == list(range(FEW))


def test_a_write_deletes_what_dead_attempts_have_staged_on_every_shard(platform: EventSQL, dsns: list[str]) -> None:
    with Publications(source_of(dsns)) as publications:
        staged(publications, 0, FEW)
        for dsn in dsns:
            with psycopg.connect(dsn) as connection:
                connection.execute("UPDATE eventsql.spark_staged_event SET eql_created_at = now() - interval '1 year'")
        assert publications.publish("nightly", 7, [])
    assert [count(dsn, "spark_staged_event") for dsn in dsns] == [0, 0, 0]


def test_a_write_forgets_the_parts_that_were_published_more_than_a_day_ago(platform: EventSQL, dsns: list[str]) -> None:
    assert publish(dsns, 0, FEW)
    for dsn, age in zip(dsns[1:], ("23 hours", "25 hours"), strict=True):
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE eventsql.spark_part SET eql_published_at = now() - %s::interval", [age])
    with Publications(source_of(dsns)) as publications:
        assert publications.publish("hourly", 0, [])
    assert [count(dsn, "spark_part") for dsn in dsns] == [0, 1, 0]


def test_a_sweep_takes_no_part_that_is_being_prepared(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(dsns, 1, "INSERT ON eventsql.spark_part", at_commit=True) as write:
        staged_events = count(dsns[1], "spark_staged_event")
        monkeypatch.setattr(staged_blocks, "ORPHANED_AFTER_HOURS", 0)
        with Publications(source_of(dsns)) as publications:
            publications._logs["shard-2"].sweep()
        assert count(dsns[1], "spark_staged_event") == staged_events > 0
    assert write.outcome is True
    assert events_of(platform) == list(range(FEW))


# Connections that are lost


@pytest.mark.parametrize(
    ("shard", "statement"), [(0, "INSERT ON eventsql.spark_publication"), (1, "UPDATE ON eventsql.spark_part")]
)
def test_a_session_that_is_ended_at_a_commit_leaves_all_or_nothing(
    platform: EventSQL, dsns: list[str], shard: int, statement: str
) -> None:
    with writing(dsns, shard, statement, at_commit=True) as write:
        write.stop.end_session()
    outcome = write.outcome
    if shard == 0:
        assert isinstance(outcome, DatabaseUnavailableError)
        assert events_of(platform) == []
        assert sum(count(dsn, "spark_staged_event") for dsn in dsns) == 0
        assert publish(dsns, 0, FEW)
    else:
        assert outcome is True, "the same write publishes what was decided"
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


@pytest.mark.parametrize(
    ("shard", "statement"), [(0, "INSERT ON eventsql.spark_publication"), (1, "UPDATE ON eventsql.spark_part")]
)
def test_a_write_that_cannot_ask_whether_it_is_decided_fails_and_the_next_one_finds_out(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch, shard: int, statement: str
) -> None:
    def unreachable(*_: object, **_options: object) -> bool:
        raise DatabaseUnavailableError("it is down")

    monkeypatch.setattr(TwoPhaseParticipant, "give_up", unreachable)
    with writing(dsns, shard, statement, at_commit=True) as write:
        write.stop.end_session()
    assert isinstance(write.outcome, DatabaseUnavailableError)
    monkeypatch.undo()
    assert publish(dsns, 0, FEW) == (shard == 0)
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


@pytest.mark.nightly
def test_a_write_whose_shard_does_not_take_its_part_says_that_it_is_published_and_not_finished(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "FINISH_SECONDS", 0.0)
    with writing(dsns, 1, "UPDATE ON eventsql.spark_part", at_commit=True) as write:
        write.stop.end_session()
        write.join()
        with pytest.raises(PublicationUnfinishedError, match="is published, and some of its events cannot be read yet"):
            publish(dsns, FEW, FEW)
    assert isinstance(write.outcome, PublicationUnfinishedError)
    monkeypatch.undo()
    assert not publish(dsns, FEW, FEW)
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_a_later_write_waits_for_what_was_decided_on_its_shards(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, claim = claimed(platform)
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    monkeypatch.setattr(publication, "FINISH_SECONDS", 0.0)
    with Publications(source_of(dsns)) as publications, psycopg.connect(dsns[1]) as lock:
        lock.execute("SELECT FROM eventsql.spark_part FOR UPDATE")
        everywhere = staged(publications, FEW, FEW)
        hold = publications.hold(claim.id, "shard-2")
        alone = [Attempt(each.id, tuple(share for share in each.shares if share.shard == "shard-2"))
                 for each in staged(publications, FEW, FEW)]  # fmt: skip
        for attempts, committed in ((everywhere, None), (alone, hold)):
            with pytest.raises(DatabaseBusyError, match="was not published, because batch 7 of writer 'nightly' is"):
                publications.publish("hourly", 0, attempts, committed)
        assert publications.publish("hourly", 1, []), "what has no events on that shard does not wait"
        lock.rollback()
        assert publications.publish("hourly", 0, alone, hold)
    numbers: dict[str, list[int]] = {}
    home.transfer.run_once()
    for event in home.reader.read("orders"):
        numbers.setdefault(str(event.key), []).append(int(event.value))
    assert max(map(max, numbers.values())) >= FEW
    assert all(found == sorted(found) for found in numbers.values())


def test_a_batch_that_was_published_before_does_not_wait_for_what_was_decided_on_its_shard(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, claim = claimed(platform)
    with Publications(source_of(dsns)) as publications:
        hold = publications.hold(claim.id, "shard-2")
        alone = [Attempt(each.id, tuple(share for share in each.shares if share.shard == "shard-2"))
                 for each in staged(publications, FEW, FEW)]  # fmt: skip
        assert publications.publish("hourly", 0, alone, hold)
        kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
        monkeypatch.setattr(publication, "FINISH_SECONDS", 0.0)
        with psycopg.connect(dsns[1]) as lock:
            lock.execute("SELECT FROM eventsql.spark_part FOR UPDATE")
            assert not publications.publish("hourly", 0, alone, hold)


@pytest.mark.nightly
def test_a_write_without_a_writer_that_is_not_finished_is_not_to_be_repeated(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publication, "FINISH_SECONDS", 0.0)
    options = {"dsn": " ".join(dsns), "topic": "orders"}
    columns = StructType([StructField("value", StringType()), StructField("key", StringType())])
    anonymous = BatchWriter(WriteOptions.parse(options, streaming=False), columns, overwrite=False)
    with Publications(source_of(dsns)) as publications:
        messages = [Staged(stage(publications.write_targets("orders", {}), [rows(0, FEW)]), None)]
    with stopping(dsns[1], "UPDATE ON eventsql.spark_part", at_commit=True) as stop:
        writing = threading.Thread(target=anonymous.commit, args=(messages,))
        writing.start()
        stop.await_reached()
        stop.end_session()
        writing.join()
    assert "is published, and some of its events cannot be read yet" in caplog.text
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_every_error_after_the_decision_says_that_the_batch_is_published(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publish(dsns, 0, FEW)
    monkeypatch.setattr(publication, "FINISH_SECONDS", 0.0)

    def busy(_parts: TwoPhaseParticipant) -> None:
        raise DatabaseBusyError("no connection is free")

    monkeypatch.setattr(TwoPhaseParticipant, "announced", busy)
    with Publications(source_of(dsns)) as publications:
        deciding = publications._logs["shard-1"]
        with pytest.raises(PublicationUnfinishedError, match="cannot be read yet: no connection is free"):
            publications._await_finished(deciding, Batch("nightly", 7, ()))
    monkeypatch.undo()
    assert events_of(platform) == list(range(FEW))


def test_a_driver_that_stands_still_loses_its_transactions(
    platform: EventSQL, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "IDLE_SECONDS", 0.5)
    with writing(dsns, 0, "INSERT ON eventsql.spark_publication", at_commit=True) as write:
        for dsn in dsns[1:]:
            with psycopg.connect(dsn, autocommit=True) as connection:
                wait_until(lambda: no_transactions(connection), "the server has ended what is idle")
    assert write.outcome is True, "it was decided, and published once more from there"
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def test_the_transaction_that_decides_is_not_idle_while_others_place(platform: EventSQL, dsns: list[str]) -> None:
    with writing(dsns, 2, "UPDATE ON eventsql.spark_part") as write, psycopg.connect(dsns[0]) as connection:
        used: dict[str, datetime] = dict(
            connection.execute(
                "SELECT datname, state_change FROM pg_stat_activity "
                "WHERE datname = ANY (%s) AND state = 'idle in transaction'",
                [[conninfo_to_dict(dsn)["dbname"] for dsn in dsns]],
            ).fetchall()
        )
    deciding, placed = (used[str(conninfo_to_dict(dsn)["dbname"])] for dsn in dsns[:2])
    assert deciding > placed, "it was used again since the second shard placed its part"
    assert write.outcome is True


def test_every_commit_waits_for_the_disk(databases: Databases) -> None:
    dsns = databases(2)
    for dsn, setting in zip(dsns, ("off", "local"), strict=True):
        with psycopg.connect(dsn, autocommit=True) as connection:
            alter = sql.SQL("ALTER DATABASE {} SET synchronous_commit TO {}")
            connection.execute(alter.format(sql.Identifier(connection.info.dbname), sql.SQL(setting)))
    dsns = made(dsns)
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.seen (step text, waits text)")
            connection.execute(
                "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.seen VALUES "
                "(TG_OP || '' '' || TG_TABLE_NAME, current_setting(''synchronous_commit'')); RETURN NULL; END'"
            )
            for table in ("spark_decision", "spark_part", "spark_publication"):
                connection.execute(
                    sql.SQL(
                        "CREATE TRIGGER seeing AFTER INSERT OR UPDATE OR DELETE ON eventsql.{} "
                        "FOR EACH ROW EXECUTE FUNCTION see()"
                    ).format(sql.Identifier(table))
                )
    assert publish(dsns, 0, FEW)
    seen = set()
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            seen |= set(connection.execute("SELECT step, waits FROM public.seen").fetchall())
    assert seen == {
        (step, "on")
        for step in (
            "INSERT spark_decision", "UPDATE spark_decision", "DELETE spark_decision",
            "INSERT spark_part", "UPDATE spark_part", "INSERT spark_publication",
        )
    }  # fmt: skip


def test_a_write_that_somebody_gave_up_before_another_of_its_batch_is_not_the_first(
    platform: EventSQL, dsns: list[str]
) -> None:
    with writing(dsns, 1, "INSERT ON eventsql.spark_part") as write, psycopg.connect(dsns[0]) as connection:
        connection.execute("DELETE FROM eventsql.spark_decision")
        connection.execute(
            "INSERT INTO eventsql.spark_publication (eql_writer, eql_batch, eql_events) VALUES ('nightly', 7, 0)"
        )
    assert write.outcome is False
    assert events_of(platform) == []
    check_nothing_is_left(dsns)
    assert sum(count(dsn, "spark_staged_event") for dsn in dsns) == 0


def test_a_write_that_somebody_gave_up_before_it_decides_publishes_nothing(platform: EventSQL, dsns: list[str]) -> None:
    deciding = TwoPhaseParticipant(platform.shards[0].database)
    with writing(dsns, 2, "UPDATE ON eventsql.spark_part") as write:
        (announced,) = deciding.announced()
        assert deciding.give_up(announced.id, timeout=1.0)
    assert isinstance(write.outcome, RedefinitionError)
    assert events_of(platform) == []
    check_nothing_is_left(dsns)


def test_two_writes_of_one_batch_at_once_publish_one(platform: EventSQL, dsns: list[str]) -> None:
    outcomes: list[tuple[int, bool]] = []
    with stopping(dsns[0], "INSERT ON eventsql.spark_publication", at_commit=True) as stop:

        def write(first: int) -> None:
            outcomes.append((first, publish(dsns, first, FEW)))

        writers = [threading.Thread(target=write, args=(first,)) for first in (0, FEW)]
        writers[0].start()
        stop.await_reached()
        writers[1].start()
        with psycopg.connect(dsns[0], autocommit=True) as connection:
            wait_until(lambda: waits_for_a_transaction(connection), "the second waits for the first")
        stop.let_go()
        for writer in writers:
            writer.join()
    assert sorted(outcomes) == [(0, True), (FEW, False)]
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)
    assert sum(count(dsn, "spark_staged_event") for dsn in dsns) == 0


def test_a_replayed_batch_with_other_events_is_refused(platform: EventSQL, dsns: list[str]) -> None:
    with Publications(source_of(dsns)) as publications:
        assert publications.publish("stream", 3, staged(publications, 0, FEW), stream=StreamBatch())
        assert not publications.publish("stream", 3, staged(publications, 0, FEW), stream=StreamBatch())
        fewer = staged(publications, 0, FEW - 1)
        with pytest.raises(ConfigurationError, match=f"published before with {FEW} events, and has {FEW - 1} now"):
            publications.publish("stream", 3, fewer, stream=StreamBatch())
        publications.discard(fewer)
    assert events_of(platform) == list(range(FEW))
    check_nothing_is_left(dsns)


def waits_for_a_transaction(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
    ).fetchone()
    return row == (1,)


# A shard that cannot be reached


def test_a_publication_that_waits_for_a_shard_that_is_down_says_so_and_changes_nothing(
    platform: EventSQL, dsns: list[str]
) -> None:
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    shards = {str(shard.name): shard for shard in platform.open().shards}
    (left,) = TwoPhaseCoordinator(lambda: {name: shards[name] for name in ("shard-1", "shard-3")}).finish()
    assert left.decided
    assert str(left) == "batch 7 of writer 'nightly' is not finished: shard 'shard-2' cannot be reached"
    (left,) = TwoPhaseCoordinator(lambda: {name: shards[name] for name in ("shard-2", "shard-3")}).finish(
        abandoned_after=0
    )
    assert left.decided is None
    assert "shard 'shard-1', which knows whether it takes place, cannot be reached" in str(left)
    with pytest.raises(DatabaseBusyError, match="are not in the buffer yet"):
        shards["shard-2"].repartitioner.repartition("orders", 5, timeout=0)
    assert shards["shard-2"].registry.topic("orders").partitions == 4
    assert events_of(platform) == list(range(FEW))
    assert shards["shard-2"].repartitioner.repartition("orders", 5) is not None


def test_a_decided_part_outlives_a_crash_of_its_shard(administrator: Administrator) -> None:
    # A server of its own, since a commit on another database of the same one puts the blocks on disk, too.
    with own_server() as embedded, ExitStack() as stack:
        crashing = embedded.create_database("crashing")
        with psycopg.connect(crashing, autocommit=True) as connection:
            # What no commit waits for is not on disk before.
            connection.execute("ALTER SYSTEM SET wal_writer_delay TO '10s'")
            connection.execute("SELECT pg_reload_conf()")
        dsns = made([stack.enter_context(administrator.copied()), crashing])
        stop = Stop(crashing, "UPDATE ON eventsql.spark_part", at_commit=True)
        process = start(dsns, 0, FEW)
        stop.await_reached()
        process.kill()
        process.join()
        embedded.stop(mode="immediate")
        stop.let_go()
        embedded.start()
        with psycopg.connect(crashing, autocommit=True) as connection:
            connection.execute("DROP FUNCTION stop_here CASCADE")
        assert not publish(dsns, FEW, FEW)
        assert values_of(dsns) == list(range(FEW))


# A shard that is added


def add(dsns: list[str], new: str, on_step: Callable[[str], None] = lambda _step: None) -> None:
    with ExitStack() as stack:
        shards = [stack.enter_context(Shard(dsn, transfer=False)) for dsn in (*dsns, new)]
        # Its name comes before those of all others, which changes nothing about who decides.
        ShardAddition(shards[:-1], shards[-1], name="another", on_step=on_step).execute()


def check_order_over_an_addition(dsns: list[str]) -> None:
    """All events of keys that have moved lie before the fences of their old shards."""
    with EventSQL(*dsns, transfer=False) as platform:
        platform.transfer.run_once()
        names = names_of(platform.open())
        for shard in platform.shards:
            with shard.database.connection() as connection:
                row = connection.execute("SELECT max(eql_fence) FROM eventsql.shard_fence").fetchone()
            for event in shard.reader.read("orders"):
                if shard_of_key(str(event.key), names) != shard.name:
                    assert row is not None
                    assert event.id <= row[0], "a key that moved has an event after the fence"


def values_of(dsns: list[str]) -> list[int]:
    with EventSQL(*dsns, transfer=False) as platform:
        platform.transfer.run_once()
        return sorted(int(event.value) for shard in platform.shards for event in shard.reader.read("orders"))


@pytest.mark.nightly
def test_a_decided_part_is_published_before_the_fence_of_an_addition(databases: Databases) -> None:
    *first, new = databases(4)
    dsns = made(first)
    kill_at(dsns, FEW, 1, "UPDATE ON eventsql.spark_part", at_commit=True)
    add(dsns, new)
    everything = [*dsns, new]
    check_order_over_an_addition(everything)
    assert values_of(everything) == list(range(FEW))
    assert not publish(everything, FEW, FEW), "a batch from before an addition is known after it"
    with Publications(source_of(everything)) as publications:
        assert publications.publish("hourly", 0, staged(publications, FEW, FEW))
    check_order_over_an_addition(everything)
    assert values_of(everything) == list(range(2 * FEW))
    assert count(new, "spark_part") == 1


def test_a_write_under_way_keeps_the_fence_back(databases: Databases) -> None:
    *first, new = databases(4)
    dsns = made(first)
    with writing(dsns, 0, "INSERT ON eventsql.spark_publication", at_commit=True) as write:
        adding = threading.Thread(target=add, args=(dsns, new))
        adding.start()
        with psycopg.connect(dsns[0], autocommit=True) as connection:
            wait_until(lambda: waits_for_the_buffer(connection), "the fence waits for the write")
        write.end()
        adding.join()
    assert write.outcome is True
    check_order_over_an_addition([*dsns, new])
    assert values_of([*dsns, new]) == list(range(FEW))


def waits_for_the_buffer(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE relation = 'eventsql.event_buffer'::regclass AND NOT granted"
    ).fetchone()
    return row is not None and row[0] > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shard", "statement"),
    [(0, "INSERT ON eventsql.spark_decision"), (1, "UPDATE ON eventsql.spark_part")],
    ids=["before a part", "with all parts"],
)
def test_a_write_that_an_addition_overtakes_is_refused(
    databases: Databases, monkeypatch: pytest.MonkeyPatch, shard: int, statement: str
) -> None:
    monkeypatch.setattr(add_shard, "SUPERSEDED_SECONDS", 0.0)
    *first, new = databases(4)
    dsns = made(first)
    with writing(dsns, shard, statement) as write:
        adding = threading.Thread(target=add, args=(dsns, new))
        adding.start()
        if shard == 0:
            adding.join()
        else:
            wait_until(lambda: count(dsns[0], "spark_decision") == 0, "the addition has given the write up")
        write.end()
        adding.join()
    assert isinstance(write.outcome, RedefinitionError)
    everything = [*dsns, new]
    assert values_of(everything) == []
    assert publish(everything, 0, FEW)
    assert values_of(everything) == list(range(FEW))


@pytest.mark.nightly
def test_a_write_is_not_planned_while_a_shard_is_being_added(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    *first, new = databases(3)
    dsns = made(first)

    def die(step: str) -> None:
        if "is fenced" in step:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        add(dsns, new, die)
    monkeypatch.setattr(write_targets, "PENDING_SECONDS", 0.0)
    with Publications(source_of([*dsns, new])) as write, pytest.raises(ShardPendingError, match="'another' takes no"):
        write.write_targets("orders", {})
    with Publications(source_of(dsns)) as write, pytest.raises(ShardSetError, match="no URL leads to another"):
        write.write_targets("orders", {})
    add(dsns, new)
    assert publish([*dsns, new], 0, FEW)
    assert values_of([*dsns, new]) == list(range(FEW))


# Claims


def claimed(platform: EventSQL) -> tuple[Shard, Claim]:
    """The second shard, and a claim of it."""
    platform.registry.register_topic(Topic("rides")).register_consumer(Consumer("rides", "copies"))
    home = platform.shards[1]
    with home.database.connection() as connection:
        connection.execute("INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
                           "VALUES ('rides', -1, 'v', '{}')")  # fmt: skip
    home.transfer.run_once()
    claim = home.claims.claim("rides", "copies", owner="test")
    assert isinstance(claim, Claim)
    return home, claim


def test_a_claim_is_committed_by_its_shard_with_the_events_of_all(platform: EventSQL, dsns: list[str]) -> None:
    home, claim = claimed(platform)
    with Publications(source_of(dsns)) as publications:
        with pytest.raises(ConfigurationError, match="option claimShard is missing"):
            publications.hold(claim.id)
        with pytest.raises(ShardSetError, match="shard 'shard-9' does not exist or is down"):
            publications.hold(claim.id, "shard-9")
        hold = publications.hold(claim.id, "shard-2")
    assert publish(dsns, 0, FEW, hold)
    assert home.claims.get(claim.id)[1] == "committed"
    assert (count(dsns[0], "spark_publication"), count(dsns[1], "spark_publication")) == (0, 1)
    assert not publish(dsns, FEW, FEW, hold)
    assert events_of(platform) == list(range(FEW))


def test_a_claim_that_was_lost_publishes_nothing_on_any_shard(platform: EventSQL, dsns: list[str]) -> None:
    home, claim = claimed(platform)
    with Publications(source_of(dsns)) as publications:
        hold = publications.hold(claim.id, "shard-2")
    home.claims.release(claim)
    with pytest.raises(ClaimLostError):
        publish(dsns, 0, FEW, hold)
    assert events_of(platform) == []
    check_nothing_is_left(dsns)
    assert sum(count(dsn, "spark_staged_event") for dsn in dsns) == 0


# Planning


def test_a_shard_alone_and_a_set_without_a_shard_are_refused(dsns: list[str]) -> None:
    with Publications(source_of(dsns[:1])) as alone, pytest.raises(ShardSetError, match="'shard-1' of 3"):
        alone.write_targets("orders", {})
    with Publications(source_of(dsns[:2])) as two, pytest.raises(ShardSetError, match="no URL leads to shard-3"):
        two.write_targets("orders", {})


def test_events_without_a_key_of_one_attempt_go_to_one_shard(platform: EventSQL, dsns: list[str]) -> None:
    with Publications(source_of(dsns)) as publications:
        targets = publications.write_targets("orders", {})
        plain = pa.record_batch({"value": [b"1"] * 10})
        attempts = [stage(targets, [plain, plain]) for _ in range(30)]
        assert {len(attempt.shares) for attempt in attempts} == {1}
        assert {attempt.shares[0].shard for attempt in attempts} == set(NAMES)
        publications.discard(attempts)
