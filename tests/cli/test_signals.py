"""Events that a signal sets, where the main thread has the event's lock at that moment."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eventsql_orchestration.signals import setting

SECONDS = 30.0


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A main thread that waits in a handler ignores other signals, such as the one of the test's timeout."""
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_signal_sets_events_whose_locks_the_main_thread_has() -> None:
    stop, wake = threading.Event(), threading.Event()
    locks: list[Any] = [stop, wake]
    with setting([stop, wake], signal.SIGTERM, signal.SIGINT) as arrived:
        with locks[0]._cond, locks[1]._cond:
            signal.raise_signal(signal.SIGTERM)
        assert stop.wait(SECONDS)
        assert wake.wait(SECONDS)
        assert arrived == {signal.SIGTERM}


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_signal_ends_what_is_under_way(first: signal.Signals) -> None:
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), setting([stop], signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(first)
        assert stop.wait(SECONDS)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "eventsql-signals"]
