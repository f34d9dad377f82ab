"""Threads wake and end each other."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest

from eventsql_orchestration.errors import ClosedError
from eventsql_orchestration.threads import ThreadResult, Wake, after_commit, in_thread, others_alive, start_thread
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Until


def has_ended(name: str) -> bool:
    return f"eventsql-{name}" not in [thread.name for thread in threading.enumerate()]


def waiting_for(wake: Wake) -> int:
    """The number of threads that wait for a wake."""
    frames = sys._current_frames().values()
    return sum(frame.f_code is Wake.wait.__code__ and frame.f_locals["self"] is wake for frame in frames)


def test_a_wake_stays_set_while_a_thread_that_waited_takes_it() -> None:
    """A thread that has to end looks whether the wake is set."""
    wake = Wake()
    wake.set()
    wake._tokens.get()
    assert wake.is_set()
    assert wake.wait(0.0)


def test_a_thread_that_wakes_clears_and_waits_again_in_the_middle_of_set_is_woken_by_the_next_set(until: Until) -> None:
    """Publishers set a wake only if it is not set."""

    def take_turn() -> None:
        if wake.wait(0.0):
            wake.clear()
        waiting.append(in_thread("waiting", wake.wait))
        until(lambda: waiting_for(wake) == 1)

    for after in count():
        wake, waiting = Wake(), list[ThreadResult[bool]]()
        goes_on = interrupted(after, wake.set, handler=take_turn)
        if not wake.is_set():
            wake.set()
        assert all(each.result(PATIENCE) for each in waiting)
        if not goes_on:
            break
    assert after > 1


def test_a_thread_that_waits_is_woken_though_another_clears_the_wake_in_the_middle_of_set(until: Until) -> None:
    def clear_beside() -> None:
        wake.clear()
        waiting.append(in_thread("waiting", wake.wait))
        until(lambda: waiting_for(wake) == 1)

    for after in count():
        wake, waiting = Wake(), list[ThreadResult[bool]]()
        goes_on = interrupted(after, wake.set, handler=clear_beside)
        for each in waiting:
            assert each.wait(PATIENCE if wake.is_set() else 0.0) == wake.is_set()
        wake.set()
        if not goes_on:
            break
    assert after > 1


def test_a_wake_that_is_set_in_the_middle_of_clear_and_stays_set_has_a_token() -> None:
    """A thread that was about to wait takes it."""
    for after in count():
        wake = Wake()
        wake.set()
        goes_on = interrupted(after, wake.clear, handler=wake.set)
        assert wake.is_set() == (not wake._tokens.empty())
        if not goes_on:
            break
    assert after > 1


def test_a_token_that_clear_left_behind_wakes_nobody() -> None:
    """Otherwise, a thread that waits again and again would not rest."""
    wake = Wake()
    wake._tokens.put(None)
    assert not wake.wait(0.0)
    assert not wake.wait(0.0)


def test_ctrl_c_at_any_moment_of_set_leaves_a_wake_that_can_be_set() -> None:
    for after in count():
        wake = Wake()
        waiting = in_thread("waiting", wake.wait)
        goes_on = interrupted(after, wake.set)
        if not wake.is_set():
            wake.set()
        assert waiting.result(PATIENCE)
        if not goes_on:
            break
    assert after > 1


def test_ctrl_c_at_any_moment_of_a_wait_lets_the_other_threads_wake(until: Until) -> None:
    def set_once_both_wait() -> bool:
        until(lambda: waiting_for(wake) == 1)
        waiting = in_thread("waiting", wake.wait)
        until(lambda: waiting_for(wake) == 2)
        wake.set()
        return waiting.result(PATIENCE)

    for after in count():
        wake = Wake()
        other = in_thread("setting", set_once_both_wait)
        # Moments before the wait do not count.
        goes_on = interrupted(after, partial(wake.wait, PATIENCE), module="threads.py", events=["c_return"])
        assert other.result(PATIENCE)
        if not goes_on:
            break
    assert after > 1


def test_a_wake_wakes_until_it_is_cleared() -> None:
    wake = Wake()
    assert not wake.wait(0.0)
    wake.set()
    wake.set()
    assert wake._tokens.qsize() == 1, "it does not grow"
    assert wake.wait()
    assert wake.wait()
    wake.clear()
    assert not wake.is_set()
    assert not wake.wait(0.0)


def test_a_thread_is_not_among_the_others_that_are_alive() -> None:
    """A handler may stop its own consumption, which then waits for the other handlers alone."""
    wake = Wake()
    threads = [threading.current_thread(), start_thread("waiting", wake.wait)]
    assert others_alive(threads)
    wake.set()
    threads[1].join(PATIENCE)
    assert not others_alive(threads)


def test_the_caller_of_a_thread_gets_its_result_or_its_error() -> None:
    assert in_thread("call", lambda: 1).result(PATIENCE) == 1
    failing = in_thread("call", partial(int, "x"))
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            failing.result(PATIENCE)
    with pytest.raises(SystemExit):
        in_thread("call", sys.exit).result(PATIENCE)
    assert failing.done()


def test_a_commit_is_not_failed_by_the_error_of_waking_others(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[object] = []

    def wake(topic: str, *, error: Exception | None = None) -> None:
        if error is not None:
            raise error
        woken.append(topic)

    call = after_commit(wake)
    call("orders")
    # Nobody of a closed platform waits.
    call("orders", error=ClosedError("the platform is closed"))
    assert (woken, caplog.text) == (["orders"], "")
    call("orders", error=OSError("no connection"))
    assert "nobody was woken after a commit: no connection" in caplog.text


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
