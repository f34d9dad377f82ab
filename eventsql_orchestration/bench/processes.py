"""The processes of a benchmark. They start together, are watched, and end with the benchmark in every case.

Publishers and consumers have processes of their own, as in use: threads of one process would share one interpreter.
Each process is in a session of its own: Ctrl-C reaches only the benchmark, and the benchmark ends the processes. If
the benchmark is gone, a process finds its input closed and ends itself.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeAlias

from eventsql_orchestration.errors import BenchmarkError

Report: TypeAlias = Callable[[str, int, int], None]
"""Takes the name of a step, the number of its events that are done, and the number of all its events."""

Messages: TypeAlias = "queue.Queue[tuple[WorkerProcess, dict[str, Any] | None]]"
"""Each message of a process with the process; None at its end."""

START_SECONDS: Final = 60.0
"""Seconds that processes may take to be ready, on a busy machine."""

_END_SECONDS: Final = 2.0


class WorkerProcess:
    """One process: the number of events that it has reported, and its outcome once it is done."""

    def __init__(self, label: str, messages: Messages) -> None:
        self.label = label
        self.ready = False
        self.events = 0
        self.outcome: dict[str, Any] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eventsql_orchestration.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._reader = threading.Thread(target=self._read, args=(messages,), daemon=True)
        self._reader.start()

    def _read(self, messages: Messages) -> None:
        for line in self._output:
            messages.put((self, json.loads(line)))
        messages.put((self, None))

    def tell(self, **message: object) -> None:
        with suppress(BrokenPipeError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

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
        """Wait for the end until `deadline` (`time.monotonic`), and kill the process then."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

        self._reader.join()
        self._output.close()
        self._errors.close()


class Crew:
    """The processes of one measurement; they end with the block of this context manager.

    Every waiting method raises `BenchmarkError` when a process fails or dies, or when the time is up.
    """

    def __init__(self, dsns: Sequence[str], schema: str, report: Report) -> None:
        self._database = {"dsns": dsns, "schema": schema}
        self._report = report
        self._workers: list[WorkerProcess] = []
        self._messages: Messages = queue.Queue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close_input()

        deadline = time.monotonic() + _END_SECONDS
        with ExitStack() as ending:
            for worker in self._workers:
                ending.callback(worker.end, deadline)

    def start(self, role: Callable[..., dict[str, Any]], label: str, **arguments: object) -> WorkerProcess:
        """Start a process that runs `role`. It gets ready and waits for `go`."""
        worker = WorkerProcess(label, self._messages)
        self._workers.append(worker)
        # On standard input: everybody on the machine may read arguments, and the URL holds a password.
        worker.tell(role=f"{role.__module__}:{role.__name__}", arguments=arguments, **self._database)
        return worker

    def ready(self) -> None:
        """Wait until all processes are ready."""
        self.wait(lambda: all(worker.ready for worker in self._workers), limit=START_SECONDS, what="start")

    def go(self) -> float:
        """Wait until all processes are ready, and let them begin. Gives the time of the start (`time.monotonic`)."""
        self.ready()
        now = time.monotonic()
        for worker in self._workers:
            worker.tell(go=time.time_ns())
        return now

    def _take(self, timeout: float) -> None:
        """Receive the messages of the processes for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Empty):
            while True:
                self._note(*self._messages.get(timeout=max(0.0, deadline - time.monotonic())))

    def _note(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        match message:
            case None if worker.outcome is None:
                code, said = worker.process.wait(), worker.last_words()
                ending = f"of signal {-code}" if code < 0 else f"with exit code {code}"
                raise BenchmarkError(f"{worker.label} died {ending}, so there is no figure{said and f': {said}'}")
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

    def stop(self, worker: WorkerProcess, *, limit: float = 30.0) -> dict[str, Any]:
        """End a process that runs until it is told to end, and give its outcome."""
        worker.tell(stop=True)
        return self.outcome(worker, limit=limit)
