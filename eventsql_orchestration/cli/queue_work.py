"""`eventsql queue work`: a program handles the messages of a queue."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from eventsql_orchestration.cli.output import say
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import EventSQLError, QueueNotFoundError
from eventsql_orchestration.orchestration.local_processes import signal_group
from eventsql_orchestration.queue import Message, Queue
from eventsql_orchestration.queue.worker import QueueWorkers
from eventsql_orchestration.signals import ending, handling, setting
from eventsql_orchestration.validation import counted

_LOOK_SECONDS: Final = 0.2
"""Seconds between two looks whether the queue is drained."""

_PAUSE_SECONDS: Final = 0.05
"""Seconds between two looks whether the programs under way have ended."""


class HandlerFailedError(EventSQLError):
    """The command that handles messages ended with another exit code than 0."""


class Programs:
    """Runs a command for each message, with the body on standard input. `run` is a queue's handler."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: set[subprocess.Popen[bytes]] = set()
        self._killed = False
        # A signal's handler also takes this lock, and may run in the thread that holds it.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of programs that run or are being started."""
        with self._lock:
            return len(self._running)

    def run(self, message: Message, _connection: Connection) -> None:
        with self._lock:
            if self._killed:
                raise HandlerFailedError(f"{self._command[0]} was not started: this command ends")
            # Until it has a group of its own, Ctrl-Z would stop the new process, and this thread, which waits for it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])
            try:
                # Start it in a group of its own: Ctrl-C in a terminal would end it in the middle of its message.
                program = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._running.add(program)
        try:
            with program:
                program.communicate(message.body)
        finally:
            with self._lock:
                self._running.discard(program)
        if program.returncode:
            raise HandlerFailedError(f"{self._command[0]} {ending(program.returncode)}")

    def suspend(self) -> None:
        """Stop the programs that run and this process, until somebody continues this process: then they go on, too.

        Programs that ran on without heartbeats would lose their messages to other workers.
        """
        with self._lock:
            self._signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for program in self._running:
            signal_group(program.pid, number)

    def kill(self) -> int:
        """Kill the programs that run, with what they have started, and start no more. Gives their number."""
        with self._lock:
            self._killed = True
            self._signal(signal.SIGKILL)
            return len(self._running)


def check_command(command: Sequence[str]) -> None:
    """Raises `click.UsageError` for a command that cannot run."""
    if command[0].startswith("-"):
        raise click.UsageError(f"{command[0]} is after QUEUE, where COMMAND begins: put options before QUEUE")
    if shutil.which(command[0]) is None:
        found = "cannot be executed" if Path(command[0]).exists() else "is not there"
        raise click.UsageError(
            f"the program {command[0]!r} {found}: name a program in PATH, or the path of an executable file"
        )


def work_off(source: Queue, command: Sequence[str], *, workers: int, drain: bool) -> QueueWorkers:
    """Handle messages by a command, until a signal or, with `drain`, until none is left. Gives the workers that ended.

    The first signal lets the programs end that run; a later Ctrl-C kills them. Ctrl-Z stops them with this
    process. Raises `QueueNotFoundError` if the queue is deleted meanwhile.
    """
    stop, programs = threading.Event(), Programs(command)
    with (
        setting([stop], signal.SIGTERM, signal.SIGHUP, signal.SIGINT),
        handling(lambda *_: programs.suspend(), signal.SIGTSTP),
        source.work(programs.run, workers=workers, max_messages=1) as working,
    ):
        try:
            _await_end(source, working, programs, stop, drain=drain)
            if not working.stop(timeout=0) and (under_way := len(programs)):
                say(
                    f"waiting for {counted(under_way, 'message')} under way; the next Ctrl-C kills "
                    f"{command[0]} and ends this at once"
                )
            # Do not wait by a join of the threads: after a Ctrl-C in a join, Python 3.11 counts a running thread as
            # ended, and the command would end before the thread has given its message back.
            while working.running:
                time.sleep(_PAUSE_SECONDS)
        except BaseException:
            # Programs in groups of their own would run on where no Ctrl-C reaches them.
            if killed := programs.kill():
                say(f"killed {command[0]} at {counted(killed, 'message')}, which come again")
            raise
    return working


def _await_end(source: Queue, working: QueueWorkers, programs: Programs, stop: threading.Event, *, drain: bool) -> None:
    while not stop.wait(_LOOK_SECONDS):
        if not working.running:
            raise QueueNotFoundError(f"queue {source.name!r} was deleted: there are no messages to handle any more")
        # While a program runs, its message is left. To count a million messages takes the server a second.
        if drain and not programs and source.statistics().depth == 0:
            return
