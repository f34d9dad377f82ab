"""Steady traffic through runs that take over from one another: how soon events are handled, and the gaps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from eventsql_orchestration.dagster.measuring import Daemon, Handled, Report
from eventsql_orchestration.errors import BenchmarkError

AROUND: Final = 1.0
"""Seconds before and after a hand-over whose events are counted with it."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Events in the order in which they were handled, those of a hand-over among them. Times are in seconds."""

    events: Sequence[Handled]

    @property
    def delays(self) -> list[float]:
        """From publish to handler."""
        return [event.delay for event in self.events]

    @property
    def runs(self) -> int:
        """How many runs handled the events."""
        return len({event.process for event in self.events})

    @property
    def hand_overs(self) -> list[tuple[Handled, Handled]]:
        """The last event of a run, and the one after it, which another was given.

        Two runs follow one another by several of these: for some seconds both claim, and the faster has the next range.
        """
        return [(last, first) for last, first in pairwise(self.events) if last.process != first.process]

    @property
    def gaps(self) -> list[float]:
        """Between the two events of each of those: what traffic leaves between two of its events, at least."""
        return [first.at - last.at for last, first in self.hand_overs]

    @property
    def gaps_within(self) -> list[float]:
        """The same between two events that one run handled."""
        return [after.at - before.at for before, after in pairwise(self.events) if before.process == after.process]

    @property
    def delays_around(self) -> list[float]:
        """Delays of the events that were published at most `AROUND` before or after a hand-over."""
        between = [(last.at - AROUND, first.at + AROUND) for last, first in self.hand_overs]
        return [event.delay for event in self.events if any(a <= event.published <= b for a, b in between)]


def steady_traffic(running: Daemon, seconds: float, every: float, report: Report) -> Steady:
    """Publish an event each `every` seconds for so many `seconds`, from when the first run drains.

    Raises `BenchmarkError` where an event was lost, came twice or before one that was published earlier.
    """
    running.publish(0)
    running.await_(lambda: len(running.handled()) == 1, "the run that drains")
    published = []
    started = time.monotonic()
    events = round(seconds / every)
    for number in range(events):
        # At its time, however long the one before it took.
        time.sleep(max(0.0, started + number * every - time.monotonic()))
        published.append(running.publish(0))
        report("steady traffic", number + 1, events)
    running.await_(lambda: len(running.handled()) > events, "every event")
    handled = running.handled()[1:]
    if [event.published for event in handled] != published:
        raise BenchmarkError(f"{events} events were published, and {len(handled)} others or in another order handled")
    return Steady(handled)
