"""`eventsql transfer`: move published events from the buffer into the ordered logs of their topics."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from typing import Annotated, Final

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.parameters import Seconds, command, leave_out, option
from eventsql_orchestration.signals import setting
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.validation import counted

_REPORT_SECONDS: Final = 1.0

_SHOWN_TOPICS: Final = 10
"""A report names the topics with the most events, and counts the other topics."""


class _Report:
    """Reports the moved events, at most once a second."""

    def __init__(self) -> None:
        self._moved: Counter[str] = Counter()
        self._said = 0.0

    def add(self, moved: dict[str, int]) -> None:
        self._moved.update(moved)
        if time.monotonic() - self._said >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._moved:
            most = sorted(self._moved.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN_TOPICS]
            topics = ", ".join(f"{topic} {events:,}" for topic, events in most)
            if others := len(self._moved) - len(most):
                topics += f", and {counted(others, 'other topic')}"
            say(f"transferred {counted(self._moved.total(), 'event')} ({topics})")
        self._moved.clear()
        self._said = time.monotonic()


@command()
def transfer(
    context: CliContext,
    once: Annotated[bool, option("Move the events that are there now, and end.")],
    interval: Annotated[
        float,
        option(
            "Longest wait before the next look, when no events are left to move.",
            type=Seconds(0.01, 86_400),
            default=0.2,
            metavar="SECONDS",
        ),
    ],
    retain: Annotated[
        bool,
        option(
            "Drop events beyond their retention and merge small blocks, once a minute.",
            "--retain/--no-retain",
            default=True,
        ),
    ],
) -> None:
    """Move published events into the ordered logs of their topics, until Ctrl-C or SIGTERM.

    It finishes the batch under way before it ends; a second Ctrl-C ends it at once. Several may run at once, here or in
    other programs, and share the topics. If the database goes away, the command waits for it. It also drops old
    segments of topics with a retention, and merges the small blocks of logs. With --once, it does neither: use
    `eventsql topic retain --execute` and `eventsql topic compact TOPIC --execute`.
    """
    if once:
        leave_out("is not for --once", "interval", *(["retain"] if retain else []))
    with context.platform() as platform:
        # A database that is down when the command starts is an error. The command does not wait for it.
        platform.open()
        report = _Report()
        if once:
            moved = platform.transfer.run_once()
            report.add(moved)
            if not moved:
                say("nothing to transfer")
            return

        stop, wake = threading.Event(), threading.Event()
        # The batch under way is finished: an exception in it would leave open whether its commit happened.
        with setting([stop, wake], signal.SIGTERM, signal.SIGINT) as arrived:
            say("transferring; Ctrl-C ends it")
            if retain:
                # Retention may wait for readers of a segment; the transfer must not. The thread ends with the process.
                start_thread("retention", platform.retention.run, stop)
            try:
                platform.transfer.run(stop, polling_delay=interval, wake=wake, on_moved=report.add)
            finally:
                report.flush()
        if signal.SIGINT in arrived:
            raise KeyboardInterrupt
