"""A process that dies before one of its statements, as it runs the package's own code."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import psycopg

from eventsql_orchestration import EventSQL
from tests import interleaving
from tests.waiting import PATIENCE


class StopsBefore:
    """In the place of an actor (see `interleaving`): does something before the step that it is told of, once."""

    def __init__(self, when: Callable[[list[str]], bool], stop: Callable[[], object]) -> None:
        """`when` is given the steps up to the one that is about to be taken."""
        self._steps: list[str] = []
        self._when = when
        self._stop = stop
        self._stopped = False

    def stop_before(self, step: str, _connection: psycopg.Connection[Any]) -> None:
        self._steps.append(step)
        if not self._stopped and self._when(self._steps):
            self._stopped = True
            self._stop()


def repartition_until(
    dsn: str, topic: str, partitions: int, when: Callable[[list[str]], bool], stop: Callable[[], object]
) -> None:
    """Repartition a topic, and do something before a step."""
    with interleaving.stepping(), EventSQL(dsn, transfer=False) as platform:
        # What is the same each time, such as a look at the schema, is no step of the change.
        platform.registry.topic(topic)
        with interleaving.playing(StopsBefore(when, stop)):
            platform.repartitioner.repartition(topic, partitions)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _repartition_and_die(dsn: str, topic: str, partitions: int, number: int) -> None:
    repartition_until(dsn, topic, partitions, lambda steps: len(steps) == number, _die)


def repartition_and_die(dsn: str, topic: str, partitions: int, number: int) -> bool:
    """Repartition a topic in a process that is killed before its nth step; False where it has come to its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eventsql_orchestration.shards.shard", "tests.worker", __name__])
    process = context.Process(target=_repartition_and_die, args=(dsn, topic, partitions, number))
    process.start()
    process.join(PATIENCE)
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL)
    return code != 0
