"""The ways of publishing, behind one method: all of them keep the promises of test_conformance.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import psycopg

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.errors import EventSQLError

Outcome: TypeAlias = BaseException | None
"""What became of an event: None once it is committed, otherwise its error."""


@dataclass(frozen=True)
class Way:
    """`publish` gives the outcome of each event. With `whole`, an event that fails takes those beside it along.

    With `joined`, events are part of a transaction of the caller, on a connection of its own.
    """

    publish: Callable[[EventSQL, Sequence[Publication]], list[Outcome]]
    whole: bool = False
    straight: bool = False
    joined: bool = False


def _one_by_one(platform: EventSQL, publications: Sequence[Publication]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for publication in publications:
        try:
            platform.publisher.publish(publication)
            outcomes.append(None)
        except EventSQLError as error:
            outcomes.append(error)
    return outcomes


def _batch(platform: EventSQL, publications: Sequence[Publication]) -> list[Outcome]:
    try:
        assert platform.publisher.publish_all(publications) == len(publications)
    except EventSQLError as error:
        return [error] * len(publications)
    return [None] * len(publications)


def _outbox(platform: EventSQL, publications: Sequence[Publication]) -> list[Outcome]:
    half = len(publications) // 2
    try:
        with psycopg.connect(platform.database.dsn, prepare_threshold=None) as mine:
            for publication in publications[:half]:
                platform.publisher.publish(publication, connection=mine)
            platform.publisher.publish_all(publications[half:], connection=mine)
    except EventSQLError as error:
        return [error] * len(publications)
    return [None] * len(publications)


def _buffered(platform: EventSQL, publications: Sequence[Publication]) -> list[Outcome]:
    outcomes: list[Outcome] = [None] * len(publications)
    given = {}
    with platform.buffered_publisher(max_age=0.001, max_events=80, flushes=2) as publisher:
        for place, publication in enumerate(publications):
            try:
                given[place] = publisher.publish(publication)
            except EventSQLError as error:
                outcomes[place] = error
    for place, acknowledgement in given.items():
        outcomes[place] = acknowledgement.exception(0)
    return outcomes


def _tasks(platform: EventSQL, publications: Sequence[Publication]) -> list[Outcome]:
    async def play() -> list[Outcome]:
        async with platform.async_publisher(max_age=0.001, max_events=80, flushes=2) as publisher:
            outcomes = await asyncio.gather(*map(publisher.publish, publications), return_exceptions=True)
        return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]

    return asyncio.run(play())


WAYS: Final = {
    "one by one": Way(_one_by_one),
    "batch": Way(_batch, whole=True),
    "straight": Way(_batch, whole=True, straight=True),
    "outbox": Way(_outbox, whole=True, joined=True),
    "buffered": Way(_buffered),
    "asyncio": Way(_tasks),
}
