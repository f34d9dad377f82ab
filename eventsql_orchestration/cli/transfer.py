"""`eventsql transfer`: move published events from the buffer into the ordered logs of their topics."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import counted, say
from eventsql_orchestration.cli.parameters import Number

_REPORT_SECONDS: Final = 1.0


class _Report:
    """Reports the moved events, at most once a second."""

    def __init__(self) -> None:
        self._moved: dict[str, int] = {}
        self._said = 0.0

    def add(self, moved: dict[str, int]) -> None:
        for topic, events in moved.items():
            self._moved[topic] = self._moved.get(topic, 0) + events
        if time.monotonic() - self._said >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._moved:
            topics = ", ".join(f"{topic} {events:,}" for topic, events in sorted(self._moved.items()))
            say(f"transferred {counted(sum(self._moved.values()), 'event')} ({topics})")
        self._moved = {}
        self._said = time.monotonic()


@click.command(short_help="Move published events into their topics' logs.")
@click.option("--once", is_flag=True, help="Move the events that are there now, and end.")
@click.option(
    "--interval",
    type=Number(0.01, 86_400),
    default=0.2,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait before the next look when no events are left to move.",
)
@click.option(
    "--retain/--no-retain", default=True, show_default=True, help="Drop events beyond their retention, once a minute."
)
@pass_context
def transfer(context: CliContext, *, once: bool, interval: float, retain: bool) -> None:
    """Move published events into the ordered logs of their topics, until Ctrl-C or SIGTERM.

    Several may run at once, here or in other programs, and share the topics. If the database goes away, the command
    waits for it. It also drops old segments of topics with a retention. With --once it does not: use `eventsql topic
    retain`.
    """
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

        wake = threading.Event()
        with _until_terminated(wake) as stop:
            say("transferring; Ctrl-C ends it")
            if retain:
                # Retention may wait for readers of a segment; the transfer must not. The thread ends with the process.
                threading.Thread(target=platform.retention.run, args=(stop,), name="retention", daemon=True).start()
            try:
                platform.transfer.run(stop, polling_delay=interval, wake=wake, on_moved=report.add)
            finally:
                report.flush()


@contextmanager
def _until_terminated(wake: threading.Event) -> Iterator[threading.Event]:
    """An event that SIGTERM sets together with `wake`: on a service manager's stop, the batch under way is finished."""
    stop = threading.Event()

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        stop.set()
        wake.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
