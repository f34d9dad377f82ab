"""A run as its orchestrator knows it: status, times, and the ranges that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunInput:
    """A range of offsets that a run has read, `after` exclusive and `upto` inclusive; partition -1 is all of them.

    `consumer` and `claim` are None if the run read without one, `shard` is None if there is one database.
    """

    topic: str
    partition: int
    after: int
    upto: int
    consumer: str | None = None
    claim: int | None = None
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run of an orchestrator: `job` is its job or its DAG. `root_run_id` is the run that it repeats, else None.

    `queue` is the queue whose messages it handled, if it is the run of a worker.
    """

    id: str
    job: str
    status: str
    started: datetime | None
    ended: datetime | None
    partition: str | None
    root_run_id: str | None
    inputs: tuple[RunInput, ...]
    queue: str | None = None


class Runs(Protocol):
    """A source of facts about runs."""

    def run(self, run_id: str) -> RunFacts | None:
        """The facts of a run; None if it does not exist, for example because it was deleted.

        Raises `LocalProcessError` if the orchestrator cannot be asked.
        """
