"""Threads wake and end each other."""

from __future__ import annotations

from eventsql_orchestration.threads import Wake


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
