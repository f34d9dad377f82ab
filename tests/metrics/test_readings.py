"""Scrapers share readings of a database, which rests between two of them, but not for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.metrics.figures import Figures
from eventsql_orchestration.metrics.readings import MOST_REST, REST, Readings
from eventsql_orchestration.threads import Wake, in_thread
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

FIGURES = Figures((), (), (), (), ())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def unreachable() -> Figures:
    raise DatabaseUnavailableError("down")


@pytest.mark.parametrize(
    ("read", "seconds", "rest"),
    [
        pytest.param(lambda: FIGURES, 0.5, 10.0, id="quick"),
        pytest.param(lambda: FIGURES, 2.0, REST * 2.0, id="slow"),
        pytest.param(lambda: FIGURES, 1_800.0, MOST_REST, id="behind a lock"),
        pytest.param(unreachable, 1_800.0, 10.0, id="no answer"),
    ],
)
def test_a_database_rests_after_a_reading(read: Callable[[], Figures], seconds: float, rest: float) -> None:
    clock, begun = Clock(), list[float]()

    def reading() -> Figures:
        begun.append(clock.now)
        clock.now += seconds
        return read()

    readings = Readings("a database", reading, interval=10.0, clock=clock)
    for pause in (0.0, rest - 0.5, 0.5):
        clock.now += pause
        readings.begin()
        readings.latest(PATIENCE)
    assert begun == [0.0, seconds + rest]


def test_an_outage_is_one_line_in_the_log_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    clock, answers = Clock(), iter([unreachable, unreachable, lambda: FIGURES, lambda: FIGURES, unreachable])

    def read() -> Figures:
        return next(answers)()

    readings = Readings("a database", read, interval=10.0, clock=clock)
    for _ in range(5):
        clock.now += 10.0
        readings.begin()
        readings.latest(PATIENCE)
    said = ["cannot" in record.message for record in caplog.records if record.name.endswith(".readings")]
    assert said == [True, False, True]


def test_a_database_is_read_again_after_no_thread_could_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    readings = Readings("a database", lambda: FIGURES, interval=10.0)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", no_room)
        readings.begin()
    readings.begin()
    reading = readings.latest(PATIENCE)
    assert reading is not None
    assert reading.figures is FIGURES


def test_ctrl_c_at_any_moment_of_a_scrape_lets_others_read() -> None:
    def read(go_on: Wake) -> Figures:
        go_on.wait()
        return FIGURES

    def scrape(readings: Readings[Figures]) -> None:
        readings.begin()
        readings.latest(0.001)

    for after in count():
        go_on = Wake()
        readings = Readings("a database", partial(read, go_on), interval=10.0)
        goes_on = interrupted(after, partial(scrape, readings), module="threading.py")
        go_on.set()
        in_thread("scrape", partial(scrape, readings)).result(PATIENCE)
        if not goes_on:
            break
    assert after > 5
