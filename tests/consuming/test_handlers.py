"""A handler that cannot do its work is refused before it gets an event, and none passes that was not handled."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import pytest

from eventsql_orchestration import AtOffset, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import failures
from eventsql_orchestration.consuming.handlers import check_handler, check_returned
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.consuming.queue_handler import takes_connection
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.threads import start_thread
from tests.effects import MuteError, PanicException
from tests.waiting import PATIENCE

ANSWER = Publication("answers", b"1")


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    platform.publisher.publish(Publication("orders", b"1"))
    platform.transfer.run_once()


with_one_event = pytest.mark.prepared.with_args(prepare)


async def asynchronous(_event: object, _connection: object) -> None: ...


async def asynchronous_generator(_event: object, _connection: object) -> AsyncIterator[None]:
    yield


def generator(_event: object, _connection: object) -> Iterator[None]:
    yield


def one_argument(_event: object) -> None: ...


def keyword_only(_event: object, *, connection: object) -> None: ...


class Callee:
    async def __call__(self, _event: object, _connection: object) -> None: ...

    async def method(self, _event: object, _connection: object) -> None: ...


Starter = Callable[[EventSQL, Any], object]

STARTERS: list[Starter] = [
    lambda platform, handler: platform.consumers.start("orders", "mailer", handler),
    lambda platform, handler: platform.consumers.start_batch("orders", "mailer", handler),
    lambda platform, handler: platform.consumers.start_leased("orders", "mailer", handler),
    lambda platform, handler: platform.consumers.consume_once("orders", "mailer", handler),
]


@pytest.mark.parametrize(
    ("handler", "named"),
    [
        (asynchronous, "handler asynchronous is asynchronous"),
        (partial(asynchronous), "is asynchronous"),
        (Callee(), "is asynchronous"),
        (Callee().method, "handler Callee.method is asynchronous"),
        (asynchronous_generator, "is asynchronous"),
        (generator, "handler generator is a generator"),
        (one_argument, "handler one_argument(_event: 'object') -> 'None' cannot be called with (event, "),
        (keyword_only, "cannot be called with"),
    ],
)
def test_a_handler_that_would_never_run_is_refused(handler: Any, named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        check_handler(handler, "event", "connection")
    assert named in str(refused.value)


def test_a_handler_that_takes_a_named_argument_in_the_place_of_another_is_refused() -> None:
    check_handler(lambda _events, _connection, context: context, "events", "connection", named=["context"])
    with pytest.raises(ValidationError, match="with \\(events, connection, context=…\\)"):
        check_handler(lambda _events, context: context, "events", "connection", named=["context"])


@with_one_event
@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("handler", [None, asynchronous])
def test_no_consumption_starts_with_a_handler_that_would_never_run(
    platform: EventSQL, start: Starter, handler: Any
) -> None:
    with pytest.raises(ValidationError):
        start(platform, handler)
    assert [(lag.events, lag.cause) for lag in platform.lag("orders")] == [(1, LagCause.WAITING)]


def injected(_event: object, _connection: object, *, mailer: object) -> None: ...


@wraps(injected)
def injecting(*arguments: object) -> None:
    injected(*arguments, mailer=print)


@pytest.mark.parametrize(
    "handler", [injecting, print, partial(print, "event"), lambda *_: None, lambda event, _, more=1: more]
)
def test_any_callable_with_these_arguments_is_a_handler(handler: Any) -> None:
    check_handler(handler, "event", "connection")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before 3.14, Python evaluates annotations at the definition")
@pytest.mark.parametrize("parameters", ["event: Event", "event: Event, connection: Connection"])
def test_a_handler_may_be_annotated_with_names_that_only_type_checkers_import(parameters: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(f"def handle({parameters}) -> Done: ...", __file__, "exec", dont_inherit=True), names)
    assert takes_connection(names["handle"]) == ("connection" in parameters)


@pytest.mark.parametrize(
    "returning", [lambda: asynchronous(1, 2), lambda: generator(1, 2), lambda: asynchronous_generator(1, 2)]
)
@pytest.mark.filterwarnings("error")
def test_a_returned_awaitable_or_generator_is_an_error(returning: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        check_returned(returning())


@pytest.mark.parametrize("returned", [ANSWER, [ANSWER], (ANSWER, ANSWER)])
def test_returned_publications_are_an_error_because_nobody_publishes_them(returned: object) -> None:
    with pytest.raises(TypeError):
        check_returned(returned)


def test_other_returned_values_are_ignored() -> None:
    for returned in (None, 1, "text", (), [], [b"bytes"], {"rows": 1}):
        check_returned(returned)


@with_one_event
def test_an_event_whose_handler_returns_publications_has_failed(platform: EventSQL) -> None:
    platform.consumers.consume_once("orders", "mailer", lambda _events, _connection: [ANSWER])
    (state,) = platform.registry.consumer("orders", "mailer")
    assert (state.last_event_id, state.attempts) == (0, 1)


@with_one_event
@pytest.mark.parametrize("way", ["start", "start_batch", "start_leased"])
@pytest.mark.filterwarnings("error")
def test_an_event_whose_handler_returns_an_awaitable_has_failed(
    platform: EventSQL, way: str, until: Callable[[Callable[[], bool]], None]
) -> None:
    def handler(_event: object, _connection: object) -> object:
        return asynchronous(1, 2)

    with getattr(platform.consumers, way)("orders", "mailer", handler):
        until(lambda: platform.lag("orders")[0].cause == LagCause.BLOCKED)
    (state,) = platform.registry.consumer("orders", "mailer")
    assert state.last_event_id == 0
    assert (state.failure or "").startswith("TypeError: the handler returned an awaitable")
    assert "run_coroutine_threadsafe" in (state.failure or "")


@with_one_event
@pytest.mark.parametrize("start", STARTERS)
def test_a_handler_whose_task_was_cancelled_has_failed(
    platform: EventSQL, until: Callable[..., None], start: Starter
) -> None:
    def handle(_events: object, _connection: object) -> None:
        raise asyncio.CancelledError

    start(platform, handle)
    until(lambda: platform.lag("orders")[0].cause is LagCause.BLOCKED)


@with_one_event
@pytest.mark.parametrize("way", ["start", "start_batch", "start_leased", "start_queue"])
@pytest.mark.parametrize("error", [SystemExit("no configuration"), GeneratorExit(), MuteError()])
def test_a_handler_that_exits_or_raises_an_error_without_text_spends_an_attempt_of_its_event_alone(
    platform: EventSQL, until: Callable[..., None], way: str, error: BaseException
) -> None:
    def handle(_events: object, _connection: object) -> None:
        raise error

    with getattr(platform.consumers, way)("orders", "mailer", handle):
        until(lambda: platform.lag("orders")[0].cause is LagCause.BLOCKED)


@with_one_event
def test_a_panic_of_a_library_in_rust_is_a_failure_in_the_main_thread_too(platform: EventSQL) -> None:
    def handle(_events: object, _connection: object) -> None:
        raise PanicException

    assert platform.consumers.consume_once("orders", "mailer", handle) == 0
    assert platform.lag("orders")[0].cause is LagCause.BLOCKED


@with_one_event
@pytest.mark.parametrize("before", [lambda _connection: None, Connection.close], ids=["open", "closed"])
def test_a_handler_that_exits_in_the_main_thread_ends_the_program(
    platform: EventSQL, before: Callable[[Connection], object]
) -> None:
    def handle(_events: object, connection: Connection) -> None:
        before(connection)
        sys.exit(3)

    for _ in range(2):
        with pytest.raises(SystemExit):
            platform.consumers.consume_once("orders", "mailer", handle)
    assert platform.lag("orders")[0].cause is LagCause.WAITING
    assert platform.consumers.consume_once("orders", "mailer", lambda _events, _connection: None) == 1


Change = Callable[[EventSQL], object]

SETTINGS: list[Change] = [
    lambda platform: platform.registry.pause("orders", "mailer"),
    lambda platform: platform.registry.resume("orders", "mailer"),
    lambda platform: platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=2),
]
MOVES: list[Change] = [
    lambda platform: platform.registry.unregister_consumer("orders", "mailer"),
    lambda platform: platform.registry.unregister_topic("orders", force=True),
    lambda platform: platform.seeker.execute("orders", "mailer", AtOffset(0), force=True),
]


def start(platform: EventSQL, handle: Callable[[], object]) -> Running:
    return platform.consumers.start("orders", "mailer", lambda _event, _connection: handle())


def start_leased(platform: EventSQL, handle: Callable[[], object]) -> Running:
    def handle_in_transaction(_events: object, lease: Lease) -> None:
        with lease.transaction():
            handle()

    return platform.consumers.start_leased("orders", "mailer", handle_in_transaction)


def start_queue(platform: EventSQL, handle: Callable[[], object]) -> Running:
    return platform.consumers.start_queue("orders", "mailer", lambda _event, _connection: handle())


@with_one_event
@pytest.mark.parametrize(
    ("begin", "change"),
    [
        *((start, change) for change in (*SETTINGS, *MOVES)),
        (start_leased, SETTINGS[0]),
        *((start_queue, change) for change in MOVES),
    ],
)
def test_a_handler_that_changes_the_consumer_that_its_transaction_has_locked_fails_instead_of_waiting_for_itself(
    platform: EventSQL, until: Callable[..., None], begin: Callable[..., Running], change: Change
) -> None:
    with begin(platform, lambda: change(platform)):
        until(lambda: platform.lag("orders")[0].cause is LagCause.BLOCKED)
        (state,) = platform.registry.consumer("orders", "mailer")
        assert (state.failure or "").startswith("ValidationError: the handler of consumer 'mailer' of topic 'orders'")


@with_one_event
def test_the_transaction_of_a_lease_may_end_in_another_thread_than_it_began_in(
    platform: EventSQL, until: Callable[..., None]
) -> None:
    def handle(_events: object, lease: Lease) -> None:
        transaction = lease.transaction()
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            first.submit(transaction.__enter__).result()
            second.submit(transaction.__exit__, None, None, None).result()

    with platform.consumers.start_leased("orders", "mailer", handle):
        until(lambda: platform.lag("orders")[0].cause in (LagCause.NONE, LagCause.BLOCKED))
    (state,) = platform.registry.consumer("orders", "mailer")
    assert (state.last_event_id, state.failure) == (1, None)


@with_one_event
@pytest.mark.parametrize("change", SETTINGS)
def test_a_handler_of_a_queue_has_locked_its_event_alone_and_changes_the_settings_of_its_consumer(
    platform: EventSQL, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    """At an event that has failed before: to resume the consumer gives such an event all its attempts back."""
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=3)
    begun: list[Event] = []
    changed: list[Event] = []

    def handle(event: Event, _connection: object) -> None:
        begun.append(event)
        if len(begun) == 1:
            raise ValueError("the first attempt")
        change(platform)
        changed.append(event)

    with platform.consumers.start_queue("orders", "mailer", handle):
        until(lambda: changed)
    assert [state.last_event_id for state in platform.registry.consumer("orders", "mailer")] == [changed[0].id]


@with_one_event
def test_a_handler_pauses_another_consumer_and_by_another_thread_its_own(
    platform: EventSQL, until: Callable[..., None]
) -> None:
    platform.registry.register_consumer(Consumer("orders", "auditor"))

    def handle(_event: object, _connection: object) -> None:
        platform.registry.pause("orders", "auditor")
        start_thread("pause", platform.registry.pause, "orders", "mailer")

    with platform.consumers.start("orders", "mailer", handle):
        until(lambda: all(state.paused for state in platform.registry.consumers("orders")))
    assert {state.name: state.last_event_id for state in platform.registry.consumers("orders")} == {
        "auditor": 0, "mailer": 1,
    }  # fmt: skip


@with_one_event
def test_delays_and_leases_are_seconds_or_timedeltas(platform: EventSQL) -> None:
    handled = threading.Event()
    with platform.consumers.start_leased(
        "orders", "mailer", lambda _events, _lease: handled.set(), lease=timedelta(seconds=30),
        polling_delay=timedelta(milliseconds=10), max_polling_delay=timedelta(0),
    ):  # fmt: skip
        assert handled.wait(PATIENCE)


@with_one_event
@pytest.mark.parametrize(
    ("delays", "said"),
    [
        ({"polling_delay": 0}, "polling_delay of 0 seconds"),
        ({"polling_delay": timedelta(seconds=-1)}, "polling_delay of -1 seconds"),
        ({"max_polling_delay": float("nan")}, "max_polling_delay must be a number of seconds"),
        ({"max_polling_delay": 10**400}, "max_polling_delay of 1000"),
        ({"max_polling_delay": "1"}, "max_polling_delay must be a number of seconds"),
    ],
)
def test_invalid_delays_are_refused(platform: EventSQL, delays: dict[str, Any], said: str) -> None:
    for start in (platform.consumers.start_batch, platform.consumers.start_leased):
        with pytest.raises(ValidationError, match=said):
            start("orders", "mailer", lambda _events, _connection: None, **delays)
