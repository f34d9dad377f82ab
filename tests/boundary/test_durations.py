"""A length of time that a public method takes is a number of seconds or a timedelta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from datetime import timedelta
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.queue import Queue
from tests.boundary import face

OTHERS = {
    "Quantiles.at rank": "a number",
    "RollupView.read every": "a multiple of the rollup's grain, of up to a hundred years",
    "Running.await_end deadline": "a moment",
    "QueueWorkers.await_end deadline": "a moment",
    "EventSQL.reach since": "a moment",
    "EventSQL.reconsider since": "a moment",
    "Views.overdue by": "up to a hundred years",
}
"""Arguments that are a number or a timedelta, and no seconds, timeout or delay."""

MINUTE = timedelta(minutes=1)


def classes() -> Iterator[type]:
    """The classes with methods that users reach, without values, whose fields have one type."""
    for dsns in (["postgresql://one/x"], ["postgresql://one/x", "postgresql://other/x"]):
        platform = EventSQL(*dsns)
        yield from (type(platform), *(type(each) for each in face.reachable(platform).values()))
    yield from face.exported().values()


def kinds(hint: Any) -> set[Any]:
    return set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}


def test_no_argument_takes_only_a_number_or_only_a_timedelta() -> None:
    wrong = {
        f"{method} {argument.name}"
        for owner in classes()
        for method in (*face.methods(owner), *(() if is_dataclass(owner) else [face.constructor(owner)]))
        for argument in method.arguments
        if len(kinds(argument.hint) & {float, timedelta}) == 1
    }
    # Only the platform makes a worker.
    assert wrong - {"QueueWorkers.QueueWorkers visibility_timeout"} == OTHERS.keys()


def test_both_forms_mean_the_same(dsn: str) -> None:
    with EventSQL(dsn, transfer=False, shard_timeout=MINUTE) as platform:
        platform.registry.register_topic(Topic("orders", 1))
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
        with platform.buffered_publisher(max_age=timedelta(milliseconds=1)) as publisher:
            publisher.publish(Publication("orders", b"1"), timeout=MINUTE).result(MINUTE)
            publisher.flush(timeout=MINUTE)
            publisher.close(MINUTE)
        platform.transfer.run_once()
        claim = platform.claims.claim("orders", "mailer", 0, owner="me", max_wait=timedelta(), lease=MINUTE)
        assert isinstance(claim, Claim)
        platform.claims.renew(claim, lease=timedelta(hours=1))
        (state,) = platform.registry.consumer("orders", "mailer")
        assert state.lease_expires_at is not None
        with platform.database.connection() as connection:
            left = connection.execute("SELECT %s - clock_timestamp()", [state.lease_expires_at]).fetchone()
        assert left is not None
        assert MINUTE < left[0] <= timedelta(hours=1)
        workers = Queue(platform, "jobs").work(lambda _message, _connection: None)
        assert workers.stop(MINUTE)
        assert platform.close(MINUTE)


@pytest.mark.parametrize("wrong", [timedelta(seconds=-1), timedelta(days=400), -1, float("nan")])
def test_an_impossible_length_of_time_is_refused_in_either_form(platform: EventSQL, wrong: timedelta | float) -> None:
    platform.registry.register_topic(Topic("orders"))
    with platform.buffered_publisher() as publisher:
        calls: list[Callable[[], object]] = [
            lambda: publisher.publish(Publication("orders", b"1"), timeout=wrong),
            lambda: publisher.flush(timeout=wrong),
            lambda: Queue(platform, "jobs").receive(wait=wrong),
            lambda: platform.close(wrong),
            lambda: platform.repartitioner.repartition("orders", 2, timeout=wrong),
            lambda: platform.async_publisher(max_age=wrong),
        ]
        for call in calls:
            with pytest.raises(ValidationError):
                call()
