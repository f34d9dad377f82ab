"""The parts of `eventsql dev` for both orchestrators: prepare the system, wait until all is consumed, report it."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TimeElapsedColumn

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.lag import lag_table, live_lag
from eventsql_orchestration.cli.output import complain, is_quiet, say
from eventsql_orchestration.cli.tables import Columns, same, show_items
from eventsql_orchestration.cli.warm_spark import provide_java, spark_environment, spark_for_runs
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.orchestration.errors import RoundError
from eventsql_orchestration.orchestration.local_processes import kill_group, only_one, temporary_directory
from eventsql_orchestration.orchestration.rounds import Counts, RunCounts, TopicRound, account
from eventsql_orchestration.orchestration.shards import partition_label
from eventsql_orchestration.signals import handling
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.topics.side_consumers import without_backfills
from eventsql_orchestration.validation import advised, counted

Run = TypeVar("Run")

SIMULATION_SECONDS: Final = 60.0
"""Seconds between two rounds of the simulation, without `--once`."""

STANDSTILL_SECONDS: Final = 10.0
"""Seconds without progress after which a round names the consumers that it waits for."""

_SHOWN_PARTITIONS: Final = 10
"""The most partitions that a message names."""


class _Steps(Progress):
    """Without a terminal, rich shows the steps only when they stop, and ends a line: a line says when each begins."""

    def add_task(self, description: str, *more: Any, **fields: Any) -> TaskID:
        if not self.console.is_terminal:
            say(description)
        return super().add_task(description, *more, **fields)

    def stop(self) -> None:
        if self.live.is_started:
            super().stop()


def steps_shown() -> Progress:
    """The steps of the command on standard error, each with its time."""
    console = Console(stderr=True, quiet=is_quiet())
    return _Steps(SpinnerColumn(finished_text="✓"), "{task.description}", TimeElapsedColumn(), console=console)


def interrupt(*_: object) -> NoReturn:
    """End the command, with everything that it started, as Ctrl-C does."""
    raise KeyboardInterrupt


@contextmanager
def prepared(
    context: CliContext, directory: Path, *, cold_spark: bool, kill: Callable[[int], None] = kill_group,
    **variables: str,
) -> Iterator[tuple[EventSQL, dict[str, str], Callable[[], None]]]:  # fmt: skip
    """The parts of the system that do not depend on its orchestrator: its database, Spark, and a temporary directory.

    Gives the platform, the environment of the orchestrator's processes with these further `variables`, and a function
    that starts Spark again if it has died. No other `eventsql dev` runs on the directory meanwhile.
    """
    # Take the lock first: a second `dev` must not stop the server of the first one.
    with (
        handling(interrupt, signal.SIGTERM, signal.SIGHUP),
        only_one(directory, kill=kill),
        temporary_directory(directory) as temporary,
        context.whole_system() as platform,
    ):
        warm = provide_java(context.settings.home) and not cold_spark
        environment = {**spark_environment(platform), "TMPDIR": str(temporary), **variables}
        with spark_for_runs(directory, environment, warm=warm) as (spark, keep_spark):
            yield platform, {**environment, **spark}, keep_spark


@contextmanager
def transferring(platform: EventSQL, *, stop_seconds: float) -> Iterator[None]:
    """Move events in a thread while the block runs. The thread has `stop_seconds` to end."""
    stop, wake = threading.Event(), threading.Event()
    thread = start_thread("transfer", platform.transfer.run, stop, wake=wake)
    try:
        yield
    finally:
        stop.set()
        wake.set()
        thread.join(stop_seconds)


class Simulations(Generic[Run]):
    """Starts the simulations of a system again and again, `pause` seconds after the last time at the earliest."""

    def __init__(
        self, start: Callable[[], Sequence[Run]], has_ended: Callable[[Run], bool], *, pause: float = SIMULATION_SECONDS
    ) -> None:
        self._start = start
        self._has_ended = has_ended
        self._pause = pause
        self._due = 0.0
        self._started: Sequence[Run] = ()

    def next(self) -> None:
        """Start them if it is time, and if none is under way: two runs would place the same orders."""
        if time.monotonic() >= self._due and all(map(self._has_ended, self._started)):
            self._started = self._start()
            self._due = time.monotonic() + self._pause


@dataclass(kw_only=True)
class RunningSystem(ABC, Generic[Run]):
    """The running system with an orchestrator. `ui` says where its UI is, and `log` is the place of its logs.

    `check` raises if the orchestrator has ended. `keep_spark` starts Spark again if it has died. `before` are the
    counts from before the orchestrator started.
    """

    passing: ClassVar[tuple[type[Exception], ...]]
    """Errors after which `serve` tries again."""

    context: CliContext
    platform: EventSQL
    progress: Progress
    ui: str
    log: Path
    check: Callable[[], None]
    keep_spark: Callable[[], None] = lambda: None
    before: Counts = field(default_factory=Counts)

    @property
    @abstractmethod
    def simulations(self) -> Sequence[str]:
        """The jobs or the DAGs that publish events to look at."""

    @abstractmethod
    def set_up(self, timeout: float) -> None:
        """Register topics and consumers."""

    @abstractmethod
    def start_simulations(self) -> Sequence[Run]: ...

    @abstractmethod
    def has_ended(self, run: Run) -> bool: ...

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a run is under way that may publish or consume, or messages wait for one."""

    @abstractmethod
    def simulate(self, deadline: float) -> None:
        """Run the simulations to their end."""

    @abstractmethod
    def verify(self, deadline: float) -> list[str]:
        """Run the checks; gives the faults that they found."""

    @abstractmethod
    def run_counts(self) -> RunCounts:
        """The counts of the runs since the orchestrator started."""

    def run(self, *, once: bool, timeout: float) -> tuple[RunCounts, list[TopicRound], list[str]]:
        """Set up, and serve until the user ends it. With `once`, do a round instead, and give what `report` takes."""
        self.set_up(timeout)
        if not once:
            self.serve()
        faults = self.round(timeout)
        runs, after = self.run_counts(), Counts.take(self.platform)
        return runs, account(self.before, after, runs, alone=bool(self.simulations)), faults

    def round(self, timeout: float) -> list[str]:
        """Simulate, wait until all events are consumed, and verify. Gives the faults that the checks found."""
        deadline = time.monotonic() + timeout
        self.simulate(deadline)
        self.consume_all(deadline)
        return self.verify(deadline) if self.simulations else []

    def consume_all(self, deadline: float) -> None:
        """Wait until every consumer has consumed everything and no run is under way.

        Raises `RoundError` after `deadline`, by the monotonic clock.
        """
        task = self.progress.add_task("Consuming", total=None)
        settled: Counts | None = None
        seen, due, told = list[str](), 0.0, set[str]()
        while True:
            counts, behind = Counts.take(self.platform), _behind(self.platform)
            left = sum(lag.events for lag in behind) + sum(counts.buffered.values())
            self.progress.update(task, description=f"Consuming: {counted(left, 'event')} to go")
            # Ask for two equal counts: one count is not a snapshot, because events move between topics while they are
            # counted.
            if not left and counts == settled and not self.is_busy():
                break
            settled = counts if not left else None
            self.check()
            self.keep_spark()
            now, waits_for = time.monotonic(), _named(behind)
            if waits_for != seen:
                seen, due, told = waits_for, now + STANDSTILL_SECONDS, set()
            elif behind and now >= due:
                due = now + STANDSTILL_SECONDS
                pause = advised("consumer pause", behind[0].topic, behind[0].consumer)
                hint = f"if no program consumes that, `{pause}` lets the round end"
                if self.is_busy():
                    hint = "work is under way"
                if hint not in told:
                    told.add(hint)
                    say(f"no progress: {_shortened(waits_for)}; {hint}")
            if now > deadline:
                left_else = "runs are under way, or messages or buffered events are left"
                raise RoundError(
                    f"the round is not done in time: {_shortened(waits_for) or left_else}; see {self.log}, "
                    "or give it more seconds by `--timeout`"
                )
            time.sleep(0.5)
        self.progress.update(task, description="Consumed", completed=1, total=1)

    def serve(self) -> NoReturn:
        """Show lag, and simulate a round every minute if there is a simulation, until the user ends it.

        A `passing` error is shown once, and the next second tries again.
        """
        self.progress.stop()
        console = self.progress.console
        console.print(f"{self.ui} - Ctrl-C ends everything", highlight=False, soft_wrap=True)
        simulations = Simulations(self.start_simulations, self.has_ended)
        down = False
        with live_lag(console) as live:
            while True:
                self.check()
                try:
                    self.context.keep_embedded()
                    self.keep_spark()
                    live.update(lag_table(without_backfills(self.platform.lag())))
                    simulations.next()
                    down = False
                except self.passing as error:
                    if not down:
                        first_line, *_ = str(error).strip().split("\n")
                        complain(f"no answer, trying again: {first_line}")
                    down = True
                time.sleep(1.0)


def _behind(platform: EventSQL) -> list[ConsumerLag]:
    """The consumer partitions that are to consume more."""
    return [lag for lag in platform.lag() if lag.events and lag.cause is not LagCause.PAUSED]


def _named(behind: list[ConsumerLag]) -> list[str]:
    return [
        f"{partition_label(f'{lag.topic}/{lag.consumer}', lag.partition)} has {counted(lag.events, 'event')} left "
        f"({lag.cause})"
        for lag in behind
    ]


def _shortened(named: list[str]) -> str:
    more = len(named) - _SHOWN_PARTITIONS
    return "; ".join([*named[:_SHOWN_PARTITIONS], *([f"and {counted(more, 'more partition')}"] if more > 0 else [])])


def report(runs: RunCounts, topics: list[TopicRound], faults: list[str]) -> None:
    """Print a round. Raises `RoundError` if there are faults."""
    if failed := runs.failed:
        say(f"{counted(len(failed), 'run')} failed, for example of {failed[0]}; later runs consumed their events")
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
