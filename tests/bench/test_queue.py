"""The benchmark of queues compares the same steps with a backlog and without, and under a held snapshot and without."""

from __future__ import annotations

import pytest

from eventsql_orchestration.bench.queue import QueueBenchmark
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.queue import Queue


def test_steps_are_compared_in_one_run_and_leave_nothing(session: Session) -> None:
    options = {"backlog": 50, "hold_xmin": True, "connections": 1, "rounds": 1, "messages": 40}
    figures = {each.name: each for each in QueueBenchmark.sized(quick=True, **options).measure(session)}
    rates = {f"queue_{phase}{step}" for phase in ("", "empty_", "held_") for step in ("send", "receive")}
    ratios = {f"queue_{step}_{of}" for step in ("send", "receive") for of in ("of_empty", "held_of_free")}
    assert figures.keys() == rates | ratios
    assert {figures[name].unit for name in ratios} == {"ratio"}
    assert figures["queue_send_of_empty"].value == figures["queue_send"].value / figures["queue_empty_send"].value
    assert Queue(session.platform, "eventsql_bench_queue").depth().visible == 0


@pytest.mark.nightly
def test_messages_that_are_received_while_they_are_sent_all_count(session: Session) -> None:
    options = {"end_to_end": True, "connections": 1, "rounds": 1, "messages": 40}
    (figure,) = QueueBenchmark.sized(quick=True, **options).measure(session)
    assert figure.name == "queue_end_to_end"
    assert figure.value > 0
    assert figure.ratio_to_raw_copy is not None
    assert Queue(session.platform, "eventsql_bench_queue").depth().visible == 0


def test_pgmq_is_not_left_out_of_a_run_without_a_word(session: Session) -> None:
    options = {"end_to_end": True, "pgmq_sql": "pgmq.sql"}
    with pytest.raises(BenchmarkError):
        QueueBenchmark.sized(quick=True, **options).measure(session)
