"""What `eventsql dev` does with either orchestrator: prepare Spark, wait until all is consumed, report a round."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.progress import Progress

from eventsql_orchestration.cli.output import Columns, complain, counted, same, say, show_items
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.errors import MissingExtraError, RoundError
from eventsql_orchestration.orchestration.rounds import Counts, TopicRound
from eventsql_orchestration.spark.java import ensure_java

SPARK_SETTINGS = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""In a short session, optimizing compilation costs more than it saves: for one range, Java takes 8 s of processor time
with these settings and 14 s without. The file of EVENTSQL_SPARK_CONFIG has precedence."""


def find_java(home: Path) -> None:
    """Set the Java runtime for Spark, where Spark is installed. A location without Spark needs no Java."""
    if importlib.util.find_spec("pyspark") is None:
        return
    try:
        java = ensure_java(home)
    except MissingExtraError as error:
        complain(f"Spark will not run: {error.message}")
        return
    say(f"Java {java.version} from {java.source}: {java.home}")


def interrupt(*_: object) -> NoReturn:
    """End the command, with everything that it started, as Ctrl-C does."""
    raise KeyboardInterrupt


def spark_settings(directory: Path) -> Path:
    """Write a file of settings for sessions of a few seconds."""
    file = directory / "spark.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in SPARK_SETTINGS.items()), encoding="utf-8")
    return file


def consume_all(
    platform: EventSQL,
    progress: Progress,
    deadline: float,
    *,
    busy: Callable[[], bool],
    check: Callable[[], None],
    log: Path,
) -> None:
    """Wait until every consumer has consumed everything and no run is under way (`busy`).

    `check` raises if the orchestrator has ended. Raises `RoundError` after `deadline`, by the monotonic clock; it names
    `log`.
    """
    task = progress.add_task("Consuming", total=None)
    settled: Counts | None = None
    while True:
        counts, behind = Counts.take(platform), _behind(platform)
        left = sum(lag.events for lag in behind) + sum(counts.buffered.values())
        progress.update(task, description=f"Consuming: {left} events to go")
        # Two equal counts: one count is no snapshot, because events move between topics while they are counted.
        if not left and counts == settled and not busy():
            break
        settled = counts if not left else None
        check()
        if time.monotonic() > deadline:
            raise RoundError(f"the round is not done in time: {_named(behind)}; see {log}")
        time.sleep(0.5)
    progress.update(task, description="Consumed", completed=1, total=1)


def _behind(platform: EventSQL) -> list[ConsumerLag]:
    """The consumer partitions that are to consume more."""
    return [lag for lag in platform.lag() if lag.events and lag.cause is not LagCause.PAUSED]


def _named(behind: list[ConsumerLag]) -> str:
    return "; ".join(f"{lag.topic}/{lag.consumer}[{lag.partition}] lacks {lag.events} ({lag.cause})" for lag in behind)


def report(failed: Sequence[str], topics: list[TopicRound], faults: list[str]) -> None:
    """Print a round. `failed` has the job or the DAG of each failed run. Raises `RoundError` if there are faults."""
    if failed:
        say(f"{counted(len(failed), 'run')} failed, of {failed[0]} for example; later runs did their work")
    show_rounds(topics)
    faults += [f"topic {entry.topic}: {fault}" for entry in topics for fault in entry.faults]
    if faults:
        raise RoundError("; ".join(faults))


def show_rounds(topics: list[TopicRound]) -> None:
    """Print the topics that have consumers, events or faults, without empty topics of dead letters."""
    columns: Columns = {
        **same("topic", "published", "transferred", "consumed", "consumers", "runs", "lag"),
        "result": lambda entry: "; ".join(entry.faults) or "exact",
    }
    show_items([entry for entry in topics if entry.published or entry.consumers or entry.faults], columns)
