"""The benchmark of queues compares the same steps with a backlog and without, and under a held snapshot and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventsql_orchestration.bench.queue import QueueBenchmark
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError
from tests.bench.conftest import queues

PGMQ = """
CREATE TABLE pgmq.sent (id bigserial PRIMARY KEY, body jsonb);
CREATE FUNCTION pgmq.create(queue text) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION pgmq.send_batch(queue text, bodies jsonb[]) RETURNS SETOF bigint LANGUAGE sql
    AS 'INSERT INTO pgmq.sent (body) SELECT unnest(bodies) RETURNING id';
CREATE FUNCTION pgmq.read(queue text, seconds integer, many integer) RETURNS SETOF pgmq.sent LANGUAGE sql
    AS 'SELECT * FROM pgmq.sent ORDER BY id LIMIT many';
CREATE FUNCTION pgmq.delete(queue text, ids bigint[]) RETURNS SETOF bigint LANGUAGE sql
    AS 'DELETE FROM pgmq.sent WHERE id = ANY (ids) RETURNING id';
"""
"""Stands for the functions of PGMQ that the benchmark calls, for one connection."""


def test_steps_are_compared_in_one_run_beside_pgmq_and_leave_nothing(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "pgmq.sql"
    file.write_text(PGMQ)
    options = {"pgmq_sql": str(file), "backlog": 50, "hold_xmin": True, "connections": 1, "rounds": 1, "messages": 40}
    figures = {each.name: each for each in QueueBenchmark.sized(quick=True, **options).measure(session)}
    rates = {f"queue_{phase}{step}" for phase in ("", "empty_", "held_") for step in ("send", "receive")}
    ratios = {f"queue_{step}_{of}" for step in ("send", "receive") for of in ("of_empty", "held_of_free", "of_pgmq")}
    theirs = {"queue_pgmq_send", "queue_pgmq_receive"}
    assert figures.keys() == rates | ratios | theirs
    assert {figures[name].unit for name in ratios} == {"ratio"}
    assert figures["queue_send_of_empty"].value == figures["queue_send"].value / figures["queue_empty_send"].value
    for step in ("send", "receive"):
        own, other = figures[f"queue_{step}"].value, figures[f"queue_pgmq_{step}"].value
        assert figures[f"queue_{step}_of_pgmq"].value == own / other
    assert queues(session.platform) == []
    assert session.connection.execute("SELECT to_regnamespace('pgmq')").fetchone() == (None,)


@pytest.mark.nightly
def test_messages_that_are_received_while_they_are_sent_all_count(session: Session) -> None:
    options = {"end_to_end": True, "connections": 1, "rounds": 1, "messages": 40}
    (figure,) = QueueBenchmark.sized(quick=True, **options).measure(session)
    assert figure.name == "queue_end_to_end"
    assert figure.value > 0
    assert figure.ratio_to_raw_copy is not None
    assert queues(session.platform) == []


def test_a_schema_of_pgmq_that_was_there_stays(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "pgmq.sql"
    file.write_text(PGMQ)
    session.connection.execute("CREATE SCHEMA pgmq")
    with pytest.raises(BenchmarkError):
        QueueBenchmark.sized(quick=True, pgmq_sql=str(file)).measure(session)
    assert session.connection.execute("SELECT to_regnamespace('pgmq')").fetchone() == ("pgmq",)
    assert queues(session.platform) == []
