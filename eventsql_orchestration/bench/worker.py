"""One process of a benchmark: plays the role that it is sent on standard input, and reports on standard output."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
import threading
import time
from typing import Any, Final

from eventsql_orchestration.bench.roles import ROLES, Place

_REPORT_SECONDS: Final = 0.2


class Wire:
    """To the benchmark: says how far this process is, and hears when to begin and when to end."""

    def __init__(self, orders: io.FileIO, reports: io.FileIO) -> None:
        self._orders = orders
        self._reports = reports
        self._began = 0
        self._go = threading.Event()
        self._reported_at = 0.0
        self.stopped = threading.Event()

    def order(self) -> dict[str, Any]:
        """What to do. What comes after it is listened to by a thread."""
        order: dict[str, Any] = json.loads(self._orders.readline())
        threading.Thread(target=self._listen, daemon=True).start()
        return order

    def _listen(self) -> None:
        for line in iter(self._orders.readline, b""):
            message = json.loads(line)
            if "go" in message:
                self._began = message["go"]
                self._go.set()
            else:
                self.stopped.set()
        # The benchmark is gone; the server ends what this process has under way.
        os._exit(1)

    def ready(self) -> int:
        """Be ready, wait for the others, and give the time (`time.time_ns`) at which all begin."""
        # The pool of events is the benchmark's: Python's collector would look through it again and again.
        gc.collect()
        gc.freeze()
        self.say(ready=True)
        self._go.wait()
        return self._began

    def progress(self, events: int) -> None:
        """Say how many events are done; not each time that it is called."""
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            self.say(events=events)

    def say(self, **message: object) -> None:
        self._reports.write(json.dumps(message).encode() + b"\n")


def main() -> int:
    """The whole life of the process; gives its exit code."""
    reports = io.FileIO(os.dup(sys.stdout.fileno()), "w")
    # A stray line of anybody's would not be a report.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    wire = Wire(io.FileIO(sys.stdin.fileno(), closefd=False), reports)
    order = wire.order()
    try:
        outcome = ROLES[order["role"]](wire, Place(**order["place"]), **order["arguments"])
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark says it and fails
        wire.say(error=" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    wire.say(done=outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
