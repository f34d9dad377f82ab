"""The measurements of `eventsql bench dagster`, on a running daemon."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from eventsql_orchestration.bench.dagster_daemon import TRANSFER, Daemon, Handled
from eventsql_orchestration.bench.machine import Meter
from eventsql_orchestration.errors import BenchmarkError

SENSOR_LOOP: Final = 5.0
"""Seconds between two evaluations of all sensors by Dagster's daemon. Events are published at random moments within
this time."""

AROUND: Final = 1.0
"""Events this many seconds before and after a hand-over count as events around it."""


def cold_starts(running: Daemon, runs: int, *, within: float = SENSOR_LOOP) -> list[float]:
    """Seconds from publish to the first step of a run, for each run from rest.

    At rest, no run is under way, and Dagster has looked at the sensor since the last run. An event is published after a
    random delay of up to `within` seconds. A run before them is not measured: it waits for the import of the location.
    """
    running.await_quiet()
    before = running.ended_runs()
    running.publish(0)
    running.await_(lambda: running.ended_runs() > before, "the first run")
    delays = []
    for number in range(runs):
        running.await_quiet()
        time.sleep(SENSOR_LOOP + random.uniform(0, within))  # noqa: S311 - any moment of the loop
        steps = running.begun_steps()
        published = running.publish(0)

        def begun(before: int = steps) -> bool:
            return running.begun_steps() > before

        running.await_(begun, "the first step of a run")
        began = running.first_step(running.runs()[0].dagster_run.run_id)
        assert began is not None, "a step has begun"
        delays.append(began - published)
        running.session.report("cold starts", number + 1, runs)
    return delays


def drained(running: Daemon, events: int, every: float) -> list[float]:
    """Seconds from publish to handler, for events that a run finds while it drains: one every `every` seconds."""
    handled = _publish_while_draining(running, events, every, "draining")
    if len(running.runs()) > 1:
        raise BenchmarkError("the run that drains ended too early: measure fewer events")
    return [event.delay for event in handled]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Events in the order of their handling, by runs that take over from one another. Times are in seconds."""

    events: Sequence[Handled]

    @property
    def delays(self) -> list[float]:
        """From publish to handler."""
        return [event.delay for event in self.events]

    @property
    def runs(self) -> int:
        """The number of runs that handled the events."""
        return len({event.process for event in self.events})

    @property
    def hand_overs(self) -> list[tuple[Handled, Handled]]:
        """Pairs of neighbouring events that two different runs handled.

        One change of runs makes several pairs: for some seconds both runs claim, and the faster gets the next range.
        """
        return [(last, first) for last, first in pairwise(self.events) if last.process != first.process]

    @property
    def gaps(self) -> list[float]:
        """Time between the two events of each hand-over. It includes the gap that the traffic itself leaves."""
        return [first.at - last.at for last, first in self.hand_overs]

    @property
    def gaps_within(self) -> list[float]:
        """Time between neighbouring events that one run handled."""
        return [after.at - before.at for before, after in pairwise(self.events) if before.process == after.process]

    @property
    def delays_around(self) -> list[float]:
        """Delays of the events that were published at most `AROUND` before or after a hand-over."""
        between = [(last.at - AROUND, first.at + AROUND) for last, first in self.hand_overs]
        return [event.delay for event in self.events if any(a <= event.published <= b for a, b in between)]


def steady_traffic(running: Daemon, seconds: float, every: float) -> Traffic:
    """Publish an event every `every` seconds for `seconds` seconds, from the first draining run on.

    Raises `BenchmarkError` if an event is lost, comes twice or comes before an event that was published earlier.
    """
    return Traffic(_publish_while_draining(running, round(seconds / every), every, "steady traffic"))


def _publish_while_draining(running: Daemon, events: int, every: float, step: str) -> list[Handled]:
    """Publish events from the first draining run on. Returns the events in the order in which they were handled."""
    running.publish(0)
    running.await_(lambda: len(running.handled()) == 1, "the run that drains")

    published = []
    started = time.monotonic()
    for number in range(events):
        # Each event has its fixed time; a slow event does not delay the next.
        time.sleep(max(0.0, started + (number + 1) * every - time.monotonic()))
        published.append(running.publish(0))
        running.session.report(step, number + 1, events)

    running.await_(lambda: len(running.handled()) > events, "every event")
    handled = running.handled()[1:]
    if [event.published for event in handled] != published:
        raise BenchmarkError(f"the handled events are not the {events} published events, or not in their order")
    return handled


def ticks_per_minute(running: Daemon, seconds: float) -> float:
    """Evaluations per minute of all sensors together, with nothing to consume."""
    before, started = running.ticks(), time.monotonic()
    time.sleep(seconds)
    return (running.ticks() - before) / (time.monotonic() - started) * 60


def transfer_at_rest(running: Daemon, seconds: float) -> tuple[float, float]:
    """Runs and ticks per hour that the transfer leaves in Dagster's history, from its first tick on, while it rests."""
    running.await_(lambda: running.ticks(TRANSFER) > 0, "the first tick of the transfer")
    ticks, runs, started = running.ticks(TRANSFER), len(running.runs()), time.monotonic()
    time.sleep(seconds)
    hours = (time.monotonic() - started) / 3_600
    return (len(running.runs()) - runs) / hours, (running.ticks(TRANSFER) - ticks) / hours


def transfer_delays(running: Daemon) -> list[float]:
    """Seconds from the publication of each event of the topic to its move into the log."""
    events = running.session.platform.reader.stream(running.topic)
    return [(event.created_at - event.buffered_at).total_seconds() for batch in events for event in batch]


def runs_at_once(running: Daemon, runs: int) -> tuple[float, float | None]:
    """Give each of `runs` partitions an event at once.

    Gives the runs per second, and the processor seconds per run. These are the seconds of the daemon and its runs, with
    ticks and without the database's server; None if the system does not tell them. Call it once before with one run:
    the first run of a fork server waits for the import of the location.
    """
    seen, meter = running.ended_runs(), Meter({"daemon": [running.process.process.pid]})
    running.publish(*range(runs))
    running.await_(lambda: running.ended_runs() >= seen + runs, "the end of all runs")

    records = running.runs()[:runs]
    began = min(run.create_timestamp.timestamp() for run in records)
    ended = max(run.end_time or 0.0 for run in records)
    seconds = meter.taken().get("daemon")
    return runs / (ended - began), None if seconds is None else seconds / runs
