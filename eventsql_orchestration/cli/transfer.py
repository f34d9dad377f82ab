"""`eventsql transfer`: moves published events from the buffer into the ordered logs of their topics."""

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
from eventsql_orchestration.database.notifications import BUFFER

_REPORT_SECONDS: Final = 1.0


class _Report:
    """Says what was moved, at most once a second."""

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
@click.option("--once", is_flag=True, help="Move what is there now, and end.")
@click.option(
    "--interval",
    type=Number(0.01, 86_400),
    default=0.2,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait at most before the next look when nothing was left to move.",
)
@click.option(
    "--retain/--no-retain", default=True, show_default=True, help="Drop what topics need not keep, once a minute."
)
@pass_context
def transfer(context: CliContext, *, once: bool, interval: float, retain: bool) -> None:
    """Move published events into the ordered logs of their topics, until Ctrl-C or SIGTERM.

    Several may run at once, here or in other programs, and share the topics. A database that goes away while it runs is
    waited for. Old segments of topics with a retention are dropped on the way; beside --once, use `eventsql topic
    retain`.
    """
    with context.platform() as platform:
        # A database that is down when the command starts is an error, not something to wait for.
        platform.open()
        report = _Report()
        if once:
            moved = platform.transfer.run_once()
            report.add(moved)
            if not moved:
                say("nothing to transfer")
            return

        wake = threading.Event()
        several = len(platform.shards) > 1
        if not several:
            platform.listener.subscribe(BUFFER, None, wake.set)
        with _until_terminated(wake) as stop:
            say("transferring; Ctrl-C ends it")
            if retain:
                # It may wait for readers of a segment, and the transfer must not: it ends with the process.
                threading.Thread(target=platform.retention.run, args=(stop,), name="retention", daemon=True).start()
            try:
                if several:
                    platform.transfer_until(stop, polling_delay=interval, on_moved=report.add)
                else:
                    platform.transfer.run(stop, polling_delay=interval, wake=wake, on_moved=report.add)
            finally:
                report.flush()


@contextmanager
def _until_terminated(wake: threading.Event) -> Iterator[threading.Event]:
    """An event that SIGTERM sets, with `wake`, so that a service manager's stop finishes the batch under way."""
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
