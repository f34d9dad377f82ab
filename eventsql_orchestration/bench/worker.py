"""One process of a benchmark: it receives its role on standard input, and reports on standard output."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Final

from eventsql_orchestration.client.eventsql import EventSQL

_REPORT_SECONDS: Final = 0.2


class Worker:
    """The process itself: its databases, and its messages to the benchmark and from it."""

    def __init__(self, orders: BinaryIO, reports: io.FileIO) -> None:
        self._orders = orders
        self._reports = reports
        self._began = 0
        self._go = threading.Event()
        self._reported_at = 0.0
        self.stopped = threading.Event()
        self.dsns: Sequence[str] = ()
        self.schema = ""

    def play(self) -> dict[str, Any]:
        """Play the role of the first order. A thread listens to later orders."""
        role, arguments, options, self.dsns, self.schema = pickle.load(self._orders)  # noqa: S301 - the benchmark's own
        threading.Thread(target=self._listen, daemon=True).start()
        outcome: dict[str, Any] = role(self, *arguments, **options)
        return outcome

    def _listen(self) -> None:
        with suppress(EOFError):
            while True:
                match pickle.load(self._orders):  # noqa: S301 - the benchmark's own
                    case int(began):
                        self._began = began
                        self._go.set()
                    case None:
                        self.stopped.set()
        self._end()

    def _end(self) -> None:
        """End this process, and the programs that it has started: they are in its group.

        The benchmark is gone, or does not need this process any more. The server ends the statements of this process.
        """
        os.killpg(0, signal.SIGTERM)

    def platform(self, *, transfer: bool = False, straight: bool = True) -> EventSQL:
        return EventSQL(*self.dsns, schema=self.schema, migrate=False, transfer=transfer, straight=straight)

    def ready(self) -> int:
        """Report ready and wait for the others. Gives the time (`time.time_ns`) at which all begin."""
        # Exempt the benchmark's pool of events: Python's collector would look through it again and again.
        gc.collect()
        gc.freeze()
        self.say(ready=True)
        self._go.wait()
        return self._began

    def progress(self, events: int) -> None:
        """Report the number of events that are done, a few times per second at most."""
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            self.say(events=events)

    def say(self, **message: object) -> None:
        try:
            self._reports.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._end()


def main() -> int:
    """The whole life of the process; gives its exit code."""
    reports = io.FileIO(os.dup(sys.stdout.fileno()), "w")
    # Keep stray lines of libraries out of the reports.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    worker = Worker(sys.stdin.buffer, reports)
    try:
        worker.say(outcome=worker.play())
    except Exception as error:  # noqa: BLE001 - the benchmark fails with any error of its processes
        worker.say(error=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The thread that listens holds the lock of standard input: an interpreter that shuts down may crash on it.
    os._exit(code)
