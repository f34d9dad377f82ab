"""The processes of a benchmark. They start together, are watched, and end with the benchmark in every case.

Publishers and consumers have processes of their own, as in use: threads of one process would share one interpreter.
Each process is in a session of its own: Ctrl-C reaches only the benchmark, and the benchmark ends the processes. If
the benchmark is gone, a process finds its input closed, and ends itself and the programs that it has started.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeAlias

from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.signals import ending

Report: TypeAlias = Callable[[str, int, int], None]
"""Takes the name of a step, the number of its events that are done, and the number of all its events."""

WORKER: Final = (sys.executable, "-m", "eventsql_orchestration.bench.worker")

START_SECONDS: Final = 60.0
"""Seconds that processes may take to be ready, on a busy machine."""

_END_SECONDS: Final = 2.0


class WorkerProcess:
    """One process: the number of events that it has reported, and its outcome once it is done."""

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self.label = label
        self.ready = False
        self.events = 0
        self.outcome: dict[str, Any] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        # Unbuffered: a selector cannot see what is in a buffer.
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self.output = self.process.stdin, self.process.stdout

    def tell(self, order: object) -> None:
        with suppress(BrokenPipeError):
            self._input.write(pickle.dumps(order))

    def last_words(self) -> str:
        """The last line that the process wrote to its standard error, or nothing."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close_input(self) -> None:
        """Let the process end itself."""
        with suppress(BrokenPipeError):
            self._input.close()

    def end(self, deadline: float) -> None:
        """Wait for the end until `deadline` (`time.monotonic`). Then kill the process and what it has started."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        # Once the group is empty, its number may be another group's. macOS refuses to signal an empty group.
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.02)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

        self.output.close()
        self._errors.close()


class Crew:
    """The processes of one measurement; they end with the block of this context manager.

    Every waiting method raises `BenchmarkError` when a process fails or dies, or when the time is up.
    """

    def __init__(self, dsns: Sequence[str] = (), schema: str = "", report: Report = lambda *_: None) -> None:
        self._database = (dsns, schema)
        self._report = report
        self._workers: list[WorkerProcess] = []
        self._outputs = selectors.DefaultSelector()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close_input()

        deadline = time.monotonic() + _END_SECONDS
        with self._outputs, ExitStack() as ends:
            for worker in self._workers:
                ends.callback(worker.end, deadline)

    def start(
        self, role: Callable[..., dict[str, Any]], label: str, *arguments: object, **options: object
    ) -> WorkerProcess:
        """Start a process that plays `role`, a function or method. It gets ready and waits for `go`."""
        worker = self.run(WORKER, label)
        # Send it on standard input: everybody on the machine may read a command, and the URL holds a password.
        worker.tell((role, arguments, options, *self._database))
        return worker

    def run(self, command: Sequence[str], label: str) -> WorkerProcess:
        """Start a process that reports as `bench/worker.py` does. Any input tells it to begin, and its end to end."""
        worker = WorkerProcess(label, command)
        self._workers.append(worker)
        self._outputs.register(worker.output, selectors.EVENT_READ, worker)
        return worker

    def ready(self, *, limit: float = START_SECONDS) -> None:
        """Wait until all processes are ready."""
        self.wait(lambda: all(worker.ready for worker in self._workers), limit=limit, what="start")

    def go(self) -> float:
        """Wait until all processes are ready, and let them begin. Gives the time of the start (`time.monotonic`)."""
        self.ready()
        now = time.monotonic()
        for worker in self._workers:
            worker.tell(time.time_ns())
        return now

    def _take(self, timeout: float) -> None:
        """Receive the messages of the processes for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while ready := self._outputs.select(max(0.0, deadline - time.monotonic())):
            for key, _ in ready:
                worker: WorkerProcess = key.data
                if line := worker.output.readline():
                    self._note(worker, json.loads(line))
                else:
                    self._outputs.unregister(worker.output)
                    self._end_of(worker)

    def _end_of(self, worker: WorkerProcess) -> None:
        if worker.outcome is None:
            how, said = ending(worker.process.wait()), worker.last_words()
            raise BenchmarkError(f"{worker.label} {how}, so there is no figure{said and f': {said}'}")

    def _note(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        match message:
            case {"ready": True}:
                worker.ready = True
            case {"events": int(events)}:
                worker.events = events
            case {"step": str(step), "done": int(done), "all": int(events)}:
                self._report(step, done, events)
            case {"error": error}:
                raise BenchmarkError(f"{worker.label} failed: {error}")
            case {"outcome": outcome}:
                worker.outcome = outcome

    def wait(self, condition: Callable[[], bool], *, limit: float, what: str, every: float = 0.05) -> None:
        """Wait until the condition holds, for `limit` seconds at most; it is evaluated every `every` seconds."""
        deadline = time.monotonic() + limit
        self._take(0.0)
        while not condition():
            if time.monotonic() > deadline:
                words = "; ".join(f"{each.label}: {said}" for each in self._workers if (said := each.last_words()))
                raise BenchmarkError(f"{what} did not end within {limit:.0f} s{f' ({words})' if words else ''}")
            self._take(every)

    def outcome(self, worker: WorkerProcess, *, limit: float) -> dict[str, Any]:
        """The outcome of a process, when it is done."""
        self.wait(lambda: worker.outcome is not None, limit=limit, what=worker.label)
        assert worker.outcome is not None, "that was waited for"
        return worker.outcome

    def outcomes(
        self, workers: Sequence[WorkerProcess], *, events: int, step: str, limit: float
    ) -> list[dict[str, Any]]:
        """The outcomes of processes that together handle `events`, when all are done."""

        def done() -> bool:
            self._report(step, sum(each.events for each in workers), events)
            return all(each.outcome is not None for each in workers)

        self.wait(done, limit=limit, what=step)
        return [self.outcome(each, limit=1.0) for each in workers]

    def stop(self, worker: WorkerProcess) -> dict[str, Any]:
        """End a process that runs until it is told to end, and give its outcome."""
        worker.tell(None)
        return self.outcome(worker, limit=30.0)
