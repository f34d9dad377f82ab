"""The processes of a benchmark: started together, watched, and ended with it whatever happens.

Publishers and consumers have processes of their own, as they have in use: threads of one process would share one
interpreter. Each is in a session of its own, so that Ctrl-C reaches the benchmark alone, which ends them; one whose
benchmark is gone finds its input closed and ends itself.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from eventsql_orchestration.errors import BenchmarkError

START_SECONDS: Final = 60.0
"""How long processes may take to be ready, on a busy machine."""

_END_SECONDS: Final = 2.0


@dataclass(slots=True, eq=False)
class Member:
    """One process: how many events it has reported, and what it came to once it is done."""

    label: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    ready: bool = False
    events: int = 0
    outcome: dict[str, Any] | None = None
    _reader: threading.Thread | None = field(default=None, repr=False)

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        """The last line that the process wrote to its standard error, or nothing."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Crew:
    """The processes of one measurement; they end with the block that it is the context of.

    Every method that waits raises `BenchmarkError` when a process fails or dies, or the time is up.
    """

    def __init__(self, *dsns: str, schema: str) -> None:
        self._place = {"dsns": dsns, "schema": schema}
        self._members: list[Member] = []
        self._messages: queue.Queue[tuple[Member, dict[str, Any] | None]] = queue.Queue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            assert member.process.stdin is not None
            with suppress(BrokenPipeError):
                member.process.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            assert member.process.stdout is not None
            if member._reader is not None:  # noqa: SLF001 - a member is the crew's own
                member._reader.join()  # noqa: SLF001
            member.process.stdout.close()
            member.errors.close()

    def start(self, role: str, label: str, **arguments: object) -> Member:
        """Start a process of `worker.py`; it gets ready, and waits for `go`."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the crew
        process = subprocess.Popen(
            [sys.executable, "-m", "eventsql_orchestration.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        member = Member(label, process, errors)
        self._members.append(member)
        member._reader = threading.Thread(target=self._read, args=(member,), daemon=True)  # noqa: SLF001
        member._reader.start()  # noqa: SLF001
        # Not as arguments, which everybody on the machine may read: the URL holds a password.
        member.tell({"role": role, "place": self._place, "arguments": arguments})
        return member

    def _read(self, member: Member) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            self._messages.put((member, json.loads(line)))
        self._messages.put((member, None))

    def ready(self) -> None:
        """Wait until all are ready."""
        self.wait(lambda: all(member.ready for member in self._members), limit=START_SECONDS, what="start")

    def go(self) -> float:
        """Wait until all are ready, let them begin, and give the time (`time.monotonic`) of that."""
        self.ready()
        now = time.monotonic()
        for member in self._members:
            member.tell({"go": time.time_ns()})
        return now

    def take(self, timeout: float) -> None:
        """Take in what the processes report, for so many seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                member, message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._take(member, message)

    def _take(self, member: Member, message: dict[str, Any] | None) -> None:
        match message:
            case None if member.outcome is None:
                code = member.process.wait()
                said = member.last_words()
                raise BenchmarkError(
                    f"{member.label} died {f'of signal {-code}' if code < 0 else f'with exit code {code}'}, and the "
                    f"figure with it{f': {said}' if said else ''}"
                )
            case {"ready": True}:
                member.ready = True
            case {"events": int(events)}:
                member.events = events
            case {"error": error}:
                raise BenchmarkError(f"{member.label} failed: {error}")
            case {"done": outcome}:
                member.outcome = outcome

    def wait(
        self,
        condition: Callable[[], bool],
        *,
        limit: float,
        what: str,
        every: float = 0.05,
    ) -> None:
        """Wait until the condition holds, for `limit` seconds at most; it is looked at every so many seconds."""
        deadline = time.monotonic() + limit
        self.take(0.0)
        while not condition():
            if time.monotonic() > deadline:
                said = "; ".join(
                    f"{member.label}: {words}" for member in self._members if (words := member.last_words())
                )
                raise BenchmarkError(f"{what} did not end within {limit:.0f} s{f' ({said})' if said else ''}")
            self.take(every)

    def outcome(self, member: Member, *, limit: float) -> dict[str, Any]:
        """What a process came to, when it is done."""
        self.wait(lambda: member.outcome is not None, limit=limit, what=member.label)
        assert member.outcome is not None, "that was waited for"
        return member.outcome

    def stop(self, member: Member, *, limit: float = 30.0) -> dict[str, Any]:
        """Tell a process that runs until it is told to end, and give what it came to."""
        member.tell({"stop": True})
        return self.outcome(member, limit=limit)
