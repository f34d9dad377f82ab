"""Threads wake and end each other."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest

from eventsql_orchestration.threads import ThreadResult, Wake, in_thread
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Until


def has_ended(name: str) -> bool:
    return f"eventsql-{name}" not in [thread.name for thread in threading.enumerate()]


def test_a_wake_stays_set_while_a_thread_that_waited_takes_it() -> None:
    """A thread that has to end looks whether the wake is set."""
    wake = Wake()
    wake.set()
    wake._tokens.get()
    assert wake.is_set()
    assert wake.wait(0.0)


def test_a_wake_wakes_until_it_is_cleared() -> None:
    wake = Wake()
    assert not wake.wait(0.0)
    wake.set()
    assert wake.wait()
    assert wake.wait()
    wake.clear()
    assert not wake.is_set()
    assert not wake.wait(0.0)


def test_the_caller_of_a_thread_gets_its_result_or_its_error() -> None:
    assert in_thread("call", lambda: 1).result(PATIENCE) == 1
    failing = in_thread("call", partial(int, "x"))
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            failing.result(PATIENCE)
    assert failing.done()


def test_ctrl_c_at_any_moment_of_a_wait_for_a_thread_lets_the_thread_end(until: Until) -> None:
    def wait(called: ThreadResult[bool]) -> None:
        with suppress(TimeoutError):
            called.result(0.001)

    for after in count():
        go_on, name = Wake(), f"call-{after}"
        called = in_thread(name, go_on.wait)
        goes_on = interrupted(after, partial(wait, called))
        go_on.set()
        until(partial(has_ended, name))
        assert called.result(PATIENCE)
        if not goes_on:
            break
    assert after > 5
