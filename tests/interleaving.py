"""Forced interleavings: actors that run the package's own code take turns, one statement at a time.

Each actor is a thread. Its connections, opened through `stepping`, stop before every statement and before the end of a
transaction, until the schedule says that it is this actor's turn. An actor whose statement waits for a lock keeps
waiting while others go on; nothing is decided by time. Between two steps all actors stand still, and the state of the
database can be checked.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from eventsql_orchestration.database.single_statement import SingleStatement
from tests.waiting import PATIENCE

_POLL: Final = 0.001

Play: TypeAlias = Callable[[], object]
Choose: TypeAlias = Callable[[int, int], int]
"""Which of so many actors takes the next step; the first argument is the number of the step."""

_here = threading.local()


class Actor:
    """One party: stands before a step, waits for a lock, or has ended."""

    def __init__(self, name: str, play: Play) -> None:
        self.name = name
        self.step = ""
        self.ended = False
        self.blocked = False
        self.error: BaseException | None = None
        self.pid = 0
        self._stopping = False
        self._may_go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(play,), name=name, daemon=True)
        self._thread.start()

    def _run(self, play: Play) -> None:
        _here.actor = self
        try:
            play()
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            self.error = error
        self.ended = True
        self._stands.release()

    def stop_before(self, step: str, connection: psycopg.Connection[Any]) -> None:
        """In the actor's thread: wait for its turn."""
        if self._stopping:
            return
        self.step = step
        self.pid = connection.info.backend_pid
        self._stands.release()
        self._may_go.acquire()

    def go(self) -> None:
        self._may_go.release()

    def stands(self, blocked: Callable[[int], bool]) -> bool:
        """Whether it came to its next step or its end; False when it waits for a lock."""
        waited = 0.0
        while not self._stands.acquire(timeout=_POLL):
            if self.pid and blocked(self.pid):
                self.blocked = True
                return False
            waited += _POLL
            assert waited < PATIENCE, f"{self.name} hangs in {self.step}"
        self.blocked = False
        return True

    def let_go(self) -> None:
        """Let it run on without stopping."""
        self._stopping = True
        self._may_go.release()

    def join(self) -> None:
        self._thread.join(PATIENCE)


class _Cursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        _stop(self.connection, query if isinstance(query, str) else _text(query))
        return super().execute(query, params, **options)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[psycopg.Copy]:
        _stop(self.connection, _text(statement))
        with super().copy(statement, params, **options) as copy:
            yield copy


class _Connection(psycopg.Connection[Any]):
    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        outermost = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as transaction:
            yield transaction
            if outermost:
                _stop(self, "COMMIT")

    def commit(self) -> None:
        if self.info.transaction_status is not TransactionStatus.IDLE:
            _stop(self, "COMMIT")
        super().commit()

    def rollback(self) -> None:
        if self.info.transaction_status is not TransactionStatus.IDLE:
            _stop(self, "ROLLBACK")
        super().rollback()


def _text(query: Any) -> str:
    text = query.as_string() if hasattr(query, "as_string") else bytes(query).decode()
    return " ".join(text.split())


def _stop(connection: psycopg.Connection[Any], step: str) -> None:
    actor: Stepper | None = getattr(_here, "actor", None)
    if actor is not None:
        actor.stop_before(step, connection)


class Stepper(Protocol):
    """An observer that hears of each step before it is taken."""

    def stop_before(self, step: str, connection: psycopg.Connection[Any]) -> None: ...


@contextmanager
def _single_statements() -> Iterator[None]:
    """Single statements, which run below the driver's cursors, are steps too."""
    execute = SingleStatement.execute

    def stop_and_execute(self: SingleStatement, connection: psycopg.Connection[Any], *arguments: Any) -> int:
        _stop(connection, self._text.decode())
        return execute(self, connection, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SingleStatement, "execute", stop_and_execute)
        yield


@contextmanager
def playing(stepper: Stepper) -> Iterator[None]:
    """What this thread says in the block, on connections of `stepping`, are steps of its."""
    _here.actor = stepper
    try:
        with _single_statements():
            yield
    finally:
        _here.actor = None


@contextmanager
def stepping() -> Iterator[None]:
    """Connections that are opened in the block stop before each step of an actor."""
    connect = functools.partial(_Connection.connect, cursor_factory=_Cursor)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(psycopg, "connect", connect)
        yield


class Schedule:
    """One run of some actors in one order of their steps. `steps` takes what was done, as `actor: statement`."""

    def __init__(
        self,
        plays: Mapping[str, Play],
        choose: Choose,
        check: Callable[[], object],
        observer: psycopg.Connection[Any],
        *,
        steps: list[str],
    ) -> None:
        self.steps = steps
        self.choices: list[tuple[int, int]] = []
        self._observer = observer
        with _single_statements():
            actors = [Actor(name, play) for name, play in plays.items()]
            try:
                self._run(actors, choose, check)
            except BaseException as error:
                error.add_note("after the steps\n  " + "\n  ".join(self.steps))
                raise
            finally:
                for actor in actors:
                    actor.let_go()
                for actor in actors:
                    actor.join()

    def _run(self, actors: list[Actor], choose: Choose, check: Callable[[], object]) -> None:
        for actor in actors:
            actor.stands(self._waits)
        while True:
            for actor in actors:
                if actor.ended and actor.error is not None:
                    raise actor.error
            ready = [actor for actor in actors if not actor.ended and not actor.blocked]
            if not ready:
                assert all(actor.ended for actor in actors), "all that are left wait for each other"
                return
            choice = choose(len(self.choices), len(ready))
            self.choices.append((choice, len(ready)))
            actor = ready[choice]
            self.steps.append(f"{actor.name}: {actor.step[:100]}")
            waiting = [other for other in actors if other.blocked]
            actor.go()
            actor.stands(self._waits)
            for other in waiting:
                # What it waited for may have ended with this step.
                other.stands(self._waits)
            check()

    def _waits(self, pid: int) -> bool:
        row = self._observer.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid], prepare=True).fetchone()
        return row == (True,)


def every_order(run: Callable[[Choose], Schedule], *, begin: Sequence[int] = ()) -> int:
    """Run every order of the steps that there is, or that begins with these choices; gives their number."""
    prefix = list(begin)
    runs = 0
    while True:
        begun = tuple(prefix)
        schedule = run(lambda step, _ready, begun=begun: begun[step] if step < len(begun) else 0)  # type: ignore[misc]
        runs += 1
        choices = schedule.choices
        while len(choices) > len(begin) and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if len(choices) <= len(begin):
            return runs
        prefix = [choice for choice, _ in choices]
        prefix[-1] += 1


def some_orders(run: Callable[[Choose], Schedule], runs: int, *, seed: int) -> int:
    """Run some orders of the steps, the same each time; gives the number of different ones."""
    chance = random.Random(seed)
    orders = {tuple(run(lambda _step, ready: chance.randrange(ready)).choices) for _ in range(runs)}
    return len(orders)
