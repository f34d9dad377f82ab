"""A subscription hands each change to its handler once, in order, whatever commits late, fails or is killed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.consuming import lost_connections
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    SubscriptionNotFoundError,
    ValidationError,
)
from eventsql_orchestration.store import Change, RecordedChange, Store, Subscription, SubscriptionOptions
from eventsql_orchestration.store.change import StoreCheckpoint
from eventsql_orchestration.store.lag import SubscriptionLagReader
from eventsql_orchestration.store.order import GlobalOrder
from eventsql_orchestration.store.subscription import FAULT_DELAY, Progress
from eventsql_orchestration.threads import in_thread, start_thread
from tests.effects import FullDiskError, MuteError, fail_and_close, stand_still
from tests.fixtures import Sessions, Spawn, Terminate, Until, UntilBlocked
from tests.store.test_order import adopted, put, restored
from tests.waiting import PATIENCE


@pytest.fixture
def store(database: Database) -> Store:
    with database.connection() as connection:
        connection.execute("CREATE TABLE public.effects (id bigint GENERATED ALWAYS AS IDENTITY, n int)")
    return Store(database)


def effect(change: RecordedChange, connection: Connection) -> None:
    connection.execute("INSERT INTO public.effects (n) VALUES (%s)", [change.data["n"]])


def effects(store: Store) -> list[int]:
    with store.database.connection() as connection:
        return [n for (n,) in connection.execute("SELECT n FROM public.effects ORDER BY id")]


def subscribed(store: Store, handler: Any = effect, **options: Any) -> Subscription:
    limits = {each: options.pop(each) for each in ("batch", "max_attempts") if each in options}
    return store.subscribe("mailer", handler, background=False, options=SubscriptionOptions(**limits), **options)


def drain(subscription: Subscription) -> int:
    handled = 0
    while True:
        progress = subscription.run_once()
        handled += progress.handled
        if not progress.more:
            return handled


def due_now(store: Store) -> None:
    with store.database.connection() as connection:
        connection.execute("UPDATE eventsql.store_subscription SET eql_retry_at = now()")


def test_each_change_takes_effect_once(store: Store) -> None:
    put(store, "1", 1, 2, 3)
    subscription = subscribed(store, batch=2)
    assert drain(subscription) == 3
    put(store, "2", 4)
    assert drain(subscribed(store)) == 1
    assert effects(store) == [1, 2, 3, 4]
    before = store.subscriptions()
    assert drain(subscription) == 0
    assert [each.handled_at for each in store.subscriptions()] == [each.handled_at for each in before], (
        "nothing is written"
    )


def test_a_new_subscription_begins_where_it_is_told(store: Store) -> None:
    put(store, "1", 1, 2, 3)
    assert drain(subscribed(store, start=store.checkpoint_of("order", "1", 1))) == 2
    store.unsubscribe("mailer")
    assert drain(subscribed(store, start="latest")) == 0
    put(store, "1", 4)
    assert drain(subscribed(store, start="earliest")) == 1
    assert effects(store) == [2, 3, 4]
    with pytest.raises(ValidationError):
        subscribed(store, start="yesterday")


def test_a_subscription_passes_what_it_does_not_read(store: Store) -> None:
    subscription = subscribed(store, types=["rider"])
    put(store, "1", *range(10))
    assert drain(subscription) == 0
    assert store.subscriptions()[0].checkpoint == store.newest()
    put(store, "1", 11, of="rider")
    assert drain(subscription) == 1
    assert effects(store) == [11]


def test_a_change_that_took_its_place_first_and_commits_last_is_handled_in_its_place(
    store: Store, sessions: Sessions
) -> None:
    early = sessions()
    subscription = subscribed(store)
    store.subscribe("riders", effect, types=["rider"], background=False)
    put(store, "1", 1, connection=early)
    put(store, "2", 2)
    assert drain(subscription) == 0
    lag, riders = store.subscriptions()
    assert (lag.waiting, lag.held_back) == (0, 1)
    assert (riders.held_back, riders.held_back_by) == (0, None)
    assert lag.held_back_by is not None
    assert f"process {early.info.backend_pid} " in lag.held_back_by.description

    early.commit()
    assert store.subscriptions()[0].waiting == 2
    assert drain(subscription) == 2
    assert effects(store) == [1, 2]


def test_a_login_that_may_not_see_the_transaction_that_holds_changes_back_learns_no_age(
    store: Store, sessions: Sessions
) -> None:
    early = sessions()
    subscribed(store)
    put(store, "1", 1, connection=early)
    put(store, "2", 2)
    with store.database.connection() as connection, connection.transaction(force_rollback=True):
        connection.execute("CREATE ROLE eventsql_guest IN ROLE pg_read_all_data")
        connection.execute("SET LOCAL ROLE eventsql_guest")
        (lag,) = SubscriptionLagReader(store.database).read(connection)
    assert lag.held_back_by is not None
    assert lag.held_back_by.seconds is None
    assert str(early.info.backend_pid) in (lag.why or "")


def test_a_late_commit_between_looking_at_the_newest_and_reading_is_not_passed(
    store: Store, sessions: Sessions
) -> None:
    """A change of another type commits while the batch runs, and one that is wanted commits with it."""
    early = sessions()
    put(store, "1", 1, connection=early, of="rider")

    def during(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        early.commit()
        put(store, "2", 2)

    put(store, "0", 0, of="rider")
    assert drain(subscribed(store, types=["rider"])) == 0
    early.commit()
    early = sessions()
    put(store, "3", 3, connection=early, of="rider")
    assert drain(subscribed(store, during, types=["rider"])) == 2
    assert drain(subscribed(store, types=["rider"])) == 1
    assert effects(store) == [1, 0, 3]


def test_a_change_that_commits_between_reading_and_moving_the_subscription_is_not_passed(
    store: Store, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, read = sessions(), GlobalOrder.read
    put(store, "1", 1, connection=early)
    subscription = subscribed(store)

    def before_the_commit(*arguments: Any) -> list[RecordedChange]:
        found = read(*arguments)
        early.commit()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(GlobalOrder, "read", before_the_commit)
        assert drain(subscription) == 0
    assert drain(subscription) == 1
    assert effects(store) == [1]


def test_a_failed_change_is_tried_again_and_those_before_it_count(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.consuming.failures.FIRST_BACKOFF", 60.0)
    put(store, "1", 1, 2, 3)
    broken = {2}

    def picky(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        if change.data["n"] in broken:
            raise ValueError("not today")

    subscription = subscribed(store, picky)
    assert [lag.retry_in for lag in store.subscriptions()] == [None]
    assert drain(subscription) == 1
    (lag,) = store.subscriptions()
    assert (effects(store), lag.attempts, lag.failure) == ([1], 1, "ValueError: not today")
    assert lag.retry_in is not None
    assert 0 < lag.retry_in <= 60
    assert subscription.run_once().due_in
    (lag,) = store.subscriptions()
    assert lag.attempts == 1
    due_now(store)
    assert store.subscriptions()[0].retry_in == 0
    broken.clear()
    assert drain(subscription) == 2
    assert effects(store) == [1, 2, 3]
    (lag,) = store.subscriptions()
    assert (lag.attempts, lag.failure, lag.retry_in) == (0, None, None)


def test_the_changes_before_a_failed_change_are_handed_over_once_more_and_alone(store: Store) -> None:
    put(store, "1", *range(6))
    handed: list[int] = []

    def picky(change: RecordedChange, connection: Connection) -> None:
        handed.append(change.data["n"])
        if handed.count(3) < 3 and change.data["n"] == 3:
            raise ValueError("not today")

    subscription = subscribed(store, picky)
    assert drain(subscription) == 3
    assert handed == [0, 1, 2, 3, 0, 1, 2, 3]
    due_now(store)
    assert subscription.run_once().handled == 3


def test_a_failure_that_cannot_be_noted_is_noted_before_the_change_is_handed_over_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "1", 1)
    handed: list[RecordedChange] = []

    def fails(change: RecordedChange, _connection: Connection) -> None:
        handed.append(change)
        raise ValueError("never")

    def away(*_: object) -> Progress:
        raise DatabaseUnavailableError("gone")

    subscription = subscribed(store, fails, max_attempts=1)
    with monkeypatch.context() as patch, pytest.raises(DatabaseUnavailableError):
        patch.setattr(subscription, "_note_failure", away)
        subscription.run_once()
    assert subscription.run_once().more
    assert len(store.dead_letters("mailer")) == len(handed) == 1


def test_a_failure_is_not_noted_in_a_subscription_that_another_process_has_by_now(
    store: Store, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_change: RecordedChange, _connection: Connection) -> None:
        raise ValueError("never")

    put(store, "1", 1)
    subscription, other = subscribed(store, fails, max_attempts=1), sessions()
    note = subscription._note_failure

    def is_late(change: RecordedChange, error: BaseException) -> Progress:
        other.execute("SELECT FROM eventsql.store_subscription FOR UPDATE")
        return note(change, error)

    monkeypatch.setattr(subscription, "_note_failure", is_late)
    assert not subscription.run_once().active
    other.rollback()
    assert store.dead_letters("mailer") == []


@pytest.mark.parametrize(
    "how",
    [
        "raises",
        "returns a coroutine",
        "breaks the transaction",
        "ends the transaction",
        "fails at the commit",
        "a trigger refuses it at the commit",
        "a trigger divides by zero at the commit",
    ],
)
def test_a_change_that_keeps_failing_becomes_a_dead_letter(
    store: Store, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, "1", 1, 2, 3)
    mended = False
    with store.database.connection() as connection:
        connection.execute("ALTER TABLE public.effects ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
        connection.execute(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.n = -1 THEN RAISE 'refused'; END IF; RETURN NEW.n / 0; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER refusing AFTER INSERT ON public.effects DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW WHEN (NEW.n < 0) EXECUTE FUNCTION public.refuse()"
        )

    async def later() -> None: ...

    def broken(change: RecordedChange, connection: Connection) -> object:
        effect(change, connection)
        if change.data["n"] != 2 or mended:
            return None
        if how == "returns a coroutine":
            return later()
        if how == "raises":
            raise ValueError("never")
        if how == "breaks the transaction":
            try:
                connection.execute("SELECT 1/0")
            except psycopg.Error:
                return None
        if how == "ends the transaction":
            connection.pgconn.exec_(b"ROLLBACK")
        if how == "fails at the commit":
            effect(change, connection)
        if how.startswith("a trigger"):
            connection.execute("INSERT INTO public.effects (n) VALUES (%s)", [-1 if "refuses" in how else -2])
        return None

    subscription = subscribed(store, broken, max_attempts=2)
    for _ in range(3):
        drain(subscription)
        due_now(store)
    assert effects(store) == [1, 3]
    (letter,) = store.dead_letters("mailer")
    assert (letter.aggregate_type, letter.aggregate_id, letter.version, letter.attempts) == ("order", "1", 2, 2)
    (lag,) = store.subscriptions()
    assert (lag.handled, lag.dead_letters) == (2, 1)
    assert caplog.text.count("Traceback (most recent call last):") >= 2
    if how == "raises":
        assert caplog.text.count('raise ValueError("never")') == 2

    assert subscription.redrive() == 0
    assert store.dead_letters("mailer")[0].attempts == 3
    mended = True
    assert subscription.redrive() == 1
    assert store.dead_letters("mailer") == []
    assert effects(store) == [1, 3, 2]


def test_a_commit_that_fails_for_a_moment_is_not_the_failure_of_a_change(store: Store) -> None:
    put(store, "1", 1)
    with store.database.connection() as connection:
        connection.execute(
            "CREATE FUNCTION public.conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE 'try again' USING ERRCODE = 'serialization_failure'; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER conflicting AFTER INSERT ON public.effects DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION public.conflict()"
        )
    subscription = subscribed(store, max_attempts=1)
    with pytest.raises(psycopg.errors.SerializationFailure):
        subscription.run_once()
    assert store.dead_letters("mailer") == []
    with store.database.connection() as connection:
        connection.execute("DROP TRIGGER conflicting ON public.effects")
    assert drain(subscription) == 1


def test_dead_letters_are_dismissed_by_their_ids_or_all(store: Store) -> None:
    def broken(_change: RecordedChange, _connection: Connection) -> None:
        with pytest.raises(ValidationError, match="mailer"):
            store.dismiss("mailer")
        raise ValueError("never")

    subscription = subscribed(store, broken, max_attempts=1)
    for number in range(3):
        store.append("order", str(number), [Change("moved", {})], expected_version="any")
    drain(subscription)
    first, second, third = (letter.id for letter in store.dead_letters("mailer"))
    assert store.dismiss("mailer", [second, third + 1]) == 1
    assert [letter.id for letter in store.dead_letters("mailer")] == [first, third]
    assert store.dismiss("mailer") == 2
    assert store.dismiss("mailer") == 0
    assert store.dismiss("mailer", []) == 0
    with pytest.raises(ValidationError, match="from 1 to"):
        store.dismiss("mailer", [0])
    with pytest.raises(SubscriptionNotFoundError, match="other"):
        store.dismiss("other")


def test_a_replay_while_a_change_fails_skips_nothing(store: Store) -> None:
    put(store, "1", 1, 2, 3)
    drain(subscribed(store))
    put(store, "1", 4)

    def moved_away(change: RecordedChange, _connection: Connection) -> None:
        raise ValueError("broken")

    broken = subscribed(store, moved_away, max_attempts=1)
    record = broken._record

    def replayed_before(change: RecordedChange, error: BaseException) -> object:
        store.replay("mailer")
        return record(change, error)

    broken._record = replayed_before  # type: ignore[method-assign, assignment]
    broken.run_once()
    assert store.dead_letters("mailer") == []
    assert drain(subscribed(store)) == 4
    assert effects(store) == [1, 2, 3, 1, 2, 3, 4]


def test_a_replay_lets_a_failed_change_be_tried_at_once_and_as_often_as_a_new_one(store: Store) -> None:
    tried: list[RecordedChange] = []

    def fails(change: RecordedChange, _connection: Connection) -> None:
        tried.append(change)
        raise ValueError("not today")

    put(store, "1", 1)
    subscription = subscribed(store, fails, max_attempts=2)
    drain(subscription)
    store.replay("mailer")
    drain(subscription)
    assert len(tried) == 2
    assert [(each.attempts, each.dead_letters) for each in store.subscriptions()] == [(1, 0)]


def test_the_letters_of_another_subscription_stay(store: Store) -> None:
    def fails(change: RecordedChange, _connection: Connection) -> None:
        raise ValueError("never")

    put(store, "1", 1)
    for name in ("mailer", "billing"):
        drain(store.subscribe(name, fails, background=False, options=SubscriptionOptions(max_attempts=1)))
    store.replay("mailer")
    assert store.dismiss("mailer") == 0
    assert len(store.dead_letters("billing")) == 1


def test_a_move_to_now_that_waits_for_a_subscription_goes_behind_what_it_has_handled_meanwhile(
    store: Store, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    put(store, "1", 1)
    drain(subscribed(store))
    handling = sessions()
    handling.execute("SELECT FROM eventsql.store_subscription FOR UPDATE")
    with ThreadPoolExecutor(1) as executor:
        moving = executor.submit(store.replay, "mailer", "latest")
        until_blocked()
        put(store, "1", 2)
        place = store.checkpoint_of("order", "1", 2)
        handling.execute(
            "UPDATE eventsql.store_subscription "
            "SET eql_transaction = %(transaction)s::xid8, eql_position = %(position)s",
            place.parameters(),
        )
        handling.commit()
        assert moving.result() == place
    assert drain(subscribed(store)) == 0


def test_a_replay_drops_the_letters_of_changes_that_are_handed_over_again(store: Store) -> None:
    adopted(store.database, 2)
    put(store, "1", 3, 4)
    put(store, "old 1", 5)
    mended = False

    def picky(change: RecordedChange, connection: Connection) -> None:
        if not mended and change.data["n"] in {1, 4}:
            raise ValueError("not today")
        effect(change, connection)

    subscription = subscribed(store, picky, max_attempts=1)
    drain(subscription)
    assert [letter.aggregate_id for letter in store.dead_letters("mailer")] == ["old 1", "1"]
    mended = True
    store.replay("mailer", store.checkpoint_of("order", "old 1", 1))
    assert [letter.aggregate_id for letter in store.dead_letters("mailer")] == ["old 1"]
    assert drain(subscription) == 4
    assert subscription.redrive() == 1
    assert effects(store) == [2, 3, 5, 2, 3, 4, 5, 1]


@pytest.mark.parametrize(
    "error", [ValueError("the handler's own error for a lost connection"), SystemExit(3), asyncio.CancelledError()]
)
def test_a_running_subscription_outlives_what_a_handler_raises(
    store: Store, until: Until, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr("eventsql_orchestration.store.subscription.FAULT_DELAY", 0.01)
    monkeypatch.setattr("eventsql_orchestration.consuming.failures.FIRST_BACKOFF", 0.01)
    lost = [True]

    def wraps(change: RecordedChange, connection: Connection) -> None:
        if lost:
            lost.clear()
            if isinstance(error, ValueError):
                connection.close()
            raise error
        effect(change, connection)

    put(store, "1", 1)
    with store.subscribe("mailer", wraps):
        until(lambda: effects(store) == [1])


class Turns:
    """A lock that counts the threads that ask for it."""

    def __init__(self) -> None:
        self.asked = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_two_threads_that_start_a_subscription_at_once_begin_one_thread(
    store: Store, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription, begun = subscribed(store), list[threading.Thread]()
    second = threading.Thread(target=subscription.start)
    monkeypatch.setattr(subscription, "_starting", turns := Turns(), raising=False)

    def start_while_another_starts(*arguments: Any) -> threading.Thread:
        if not second.ident:
            second.start()
            until(lambda: turns.asked == 2 or not second.is_alive())
        begun.append(start_thread(*arguments))
        return begun[-1]

    monkeypatch.setattr("eventsql_orchestration.store.subscription.start_thread", start_while_another_starts)
    with subscription.start():
        second.join()
    assert [thread.is_alive() for thread in begun] == [False]


def test_an_outage_is_one_line_in_the_log_of_a_subscription(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventsql_orchestration.store.subscription.FAULT_DELAY", 0.01)
    subscription, stop, outages = subscribed(store), threading.Event(), ["gone"] * 3

    looks = iter([True, True, False])

    def away() -> Progress:
        if outages:
            raise DatabaseUnavailableError(outages.pop())
        if not next(looks):
            stop.set()
        return Progress(more=True)

    monkeypatch.setattr(subscription, "run_once", away)
    with caplog.at_level(logging.INFO, "eventsql_orchestration.store.subscription"):
        subscription.run(stop)
    assert [record.levelname for record in caplog.records if record.name.endswith(".subscription")] == [
        "WARNING",
        "INFO",
    ]


def test_an_error_that_is_back_after_another_one_is_a_line_in_the_log_of_a_subscription(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventsql_orchestration.store.subscription.FAULT_DELAY", 0.01)
    subscription, stop = subscribed(store), threading.Event()
    errors: list[Exception] = [DatabaseUnavailableError("gone"), ValueError("odd"), DatabaseUnavailableError("gone")]

    def away() -> Progress:
        if errors:
            raise errors.pop()
        stop.set()
        return Progress()

    monkeypatch.setattr(subscription, "run_once", away)
    with caplog.at_level(logging.INFO, "eventsql_orchestration.store.subscription"):
        subscription.run(stop)
    levels = [record.levelname for record in caplog.records if record.name.endswith(".subscription")]
    assert levels == ["WARNING", "ERROR", "WARNING", "INFO"]


@pytest.mark.parametrize("error", [DatabaseUnavailableError("gone"), ValueError("odd")])
def test_a_subscription_that_fails_waits_longer_than_between_two_looks(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    subscription, stop, waits, errors = subscribed(store), threading.Event(), list[float](), [error]

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            stop.set()
        return False

    def fails_once() -> Progress:
        if errors:
            raise errors.pop()
        return Progress()

    monkeypatch.setattr(subscription, "run_once", fails_once)
    monkeypatch.setattr(subscription._wake, "wait", wait)
    subscription.run(stop)
    assert waits == [FAULT_DELAY, SubscriptionOptions().polling_delay]


def test_a_failed_change_is_due_before_the_next_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = SubscriptionOptions(polling_delay=3_600.0)
    subscription = store.subscribe("mailer", effect, background=False, options=hour)
    stop, waits = threading.Event(), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        stop.set()
        return False

    monkeypatch.setattr(subscription, "run_once", lambda: Progress(due_in=2.0))
    monkeypatch.setattr(subscription._wake, "wait", wait)
    subscription.run(stop)
    assert waits == [2.0]


def test_a_program_that_ends_in_a_handler_is_no_failure_of_the_change(store: Store) -> None:
    def ends(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        raise SystemExit(3)

    put(store, "1", 1)
    with pytest.raises(SystemExit):
        subscribed(store, ends, max_attempts=1).run_once()
    assert drain(subscribed(store)) == 1
    assert store.dead_letters("mailer") == []


def test_a_subscription_ends_when_its_database_is_closed(dsn: str, until: Until) -> None:
    with Database(dsn) as database:
        subscription = Store(database).subscribe("mailer", effect, options=SubscriptionOptions(polling_delay=0.01))
        assert subscription.running
    until(lambda: not subscription.running)


def test_a_subscription_that_was_woken_waits_for_the_next_notification(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription, stop, woken = subscribed(store), threading.Event(), list[bool]()

    def wait(_seconds: float) -> bool:
        woken.append(subscription._wake.is_set())
        stop.set()
        return False

    subscription._wake.set()
    monkeypatch.setattr(subscription._wake, "wait", wait)
    subscription.run(stop)
    assert woken == [False]


@pytest.mark.parametrize("lose", [stand_still, Connection.close, fail_and_close, None])
def test_a_change_whose_handler_ends_its_connection_or_always_loses_it_becomes_a_dead_letter(
    store: Store,
    terminate: Terminate,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Connection], object] | None,
) -> None:
    monkeypatch.setattr("eventsql_orchestration.store.subscription.FAULT_DELAY", 0.01)
    if lose is None:
        monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)

    def loses(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        if change.data["n"] == 2:
            (lose or terminate)(connection)
            connection.execute("SELECT 1")

    put(store, "1", 1, 2, 3)
    with store.subscribe("mailer", loses, options=SubscriptionOptions(max_attempts=1)):
        until(lambda: effects(store) == [1, 3])
    assert [letter.version for letter in store.dead_letters("mailer")] == [2]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), MuteError()])
def test_a_change_whose_handler_always_fails_becomes_a_dead_letter_whatever_the_error(
    store: Store, until: Until, error: BaseException
) -> None:
    def fails(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        if change.data["n"] == 1:
            raise error

    put(store, "1", 1, 2)
    with store.subscribe("mailer", fails, options=SubscriptionOptions(max_attempts=1)):
        until(lambda: effects(store) == [2])
    assert [letter.version for letter in store.dead_letters("mailer")] == [1]


@pytest.mark.parametrize(
    "change", [Store.replay, Store.unsubscribe, lambda store, name: store.subscribe(name, print, background=False)]
)
def test_a_handler_that_moves_deletes_or_makes_its_own_subscription_fails_instead_of_waiting_for_itself(
    store: Store, until: Until, change: Callable[[Store, str], object]
) -> None:
    put(store, "1", 1)
    with store.subscribe(
        "mailer", lambda _change, _on: change(store, "mailer"), options=SubscriptionOptions(max_attempts=1)
    ):
        until(lambda: store.dead_letters("mailer"))
    (letter,) = store.dead_letters("mailer")
    assert letter.failure.startswith("ValidationError: the handler of subscription 'mailer' has locked it")


def test_a_change_whose_handler_rolls_back_fails(store: Store) -> None:
    def rolls_back(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        raise psycopg.Rollback

    put(store, "1", 1)
    drain(subscribed(store, rolls_back, max_attempts=1))
    (letter,) = store.dead_letters("mailer")
    assert "rolled its effects back" in letter.failure


def test_a_handler_that_begins_another_transaction_moves_the_subscription_nowhere(store: Store) -> None:
    def ends(change: RecordedChange, connection: Connection) -> None:
        if change.data["n"] == 2:
            connection.execute("COMMIT")
            # Nobody has the subscription now.
            assert drain(other) == 3
            connection.execute("BEGIN")

    put(store, "1", 1, 2, 3)
    other = subscribed(store)
    assert drain(subscribed(store, ends, batch=2)) == 0
    assert drain(other) == 0
    assert effects(store) == [1, 2, 3]


def test_a_handler_that_begins_another_transaction_does_not_take_its_letter(store: Store) -> None:
    def begins_again(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")

    put(store, "1", 1)
    broken = subscribed(store, begins_again, max_attempts=1)
    drain(broken)
    assert broken.redrive() == 0
    assert [letter.attempts for letter in store.dead_letters("mailer")] == [2]
    assert effects(store) == []


def test_a_full_disk_is_never_the_failure_of_a_change(store: Store) -> None:
    def finds_it_full(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        raise FullDiskError

    put(store, "1", 1)
    full = subscribed(store, finds_it_full, max_attempts=1)
    for _ in range(2):
        with pytest.raises(DatabaseFullError):
            full.run_once()
    assert drain(subscribed(store)) == 1
    assert effects(store) == [1]


def test_a_database_that_goes_away_is_no_failure_of_a_redriven_letter(store: Store, terminate: Terminate) -> None:
    def fails(change: RecordedChange, connection: Connection) -> None:
        raise ValueError

    def is_cut_off(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        terminate(connection)

    put(store, "1", 1)
    drain(subscribed(store, fails, max_attempts=1))
    with pytest.raises(DatabaseUnavailableError):
        subscribed(store, is_cut_off).redrive()
    (letter,) = store.dead_letters("mailer")
    assert (letter.attempts, "ValueError" in letter.failure) == (1, True)
    assert effects(store) == []


def test_a_connection_that_is_lost_before_the_changes_are_read_is_no_failure_of_a_change(
    store: Store, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = GlobalOrder.newest

    def cut_off(order: GlobalOrder, connection: Connection) -> StoreCheckpoint:
        terminate(connection)
        return newest(order, connection)

    put(store, "1", 1)
    subscription = subscribed(store)
    with monkeypatch.context() as patched, pytest.raises(DatabaseUnavailableError):
        patched.setattr(GlobalOrder, "newest", cut_off)
        subscription.run_once()
    assert drain(subscription) == 1


def test_one_of_several_processes_has_a_subscription(store: Store) -> None:
    put(store, "1", 1, 2)
    second = subscribed(store)

    def slow(change: RecordedChange, connection: Connection) -> None:
        assert not second.run_once().active
        effect(change, connection)

    assert drain(subscribed(store, slow)) == 2
    assert second.run_once().active
    assert effects(store) == [1, 2]


def test_one_of_two_redrives_has_a_letter(store: Store) -> None:
    def fails(change: RecordedChange, connection: Connection) -> None:
        raise ValueError

    put(store, "1", 1)
    drain(subscribed(store, fails, max_attempts=1))
    second = subscribed(store)

    def slow(change: RecordedChange, connection: Connection) -> None:
        assert second.redrive() == 0
        effect(change, connection)

    assert subscribed(store, slow).redrive() == 1
    assert store.dead_letters("mailer") == []
    assert effects(store) == [1]


def test_a_killed_subscriber_neither_skips_nor_repeats(store: Store, spawn: Spawn) -> None:
    put(store, "1", *range(10))
    worker = spawn("hold_subscription", 3)
    assert worker.line() == "in mid-batch after 3"
    worker.kill()
    subscription = subscribed(store)
    while not (progress := subscription.run_once()).active:
        # The server notices that the process is gone.
        pass
    assert progress.handled == 10
    assert effects(store) == list(range(10))


def test_a_running_subscription_is_woken_by_an_append(platform: EventSQL, until: Until) -> None:
    seen = threading.Event()
    place = platform.store
    hour = SubscriptionOptions(polling_delay=3_600.0)
    with place.subscribe("mailer", lambda change, _: seen.set() if change.kind == "last" else None, options=hour):
        until(lambda: platform.listener.listening)
        until(lambda: place.subscriptions()[0].waiting == 0)
        while not seen.is_set():
            # An append that the subscription is reading at the same time needs no notification.
            place.append("order", "1", [Change("last", {})], expected_version="any")
            seen.wait(1.0)


def test_a_subscription_that_waits_for_its_next_look_stops_before_it(store: Store, until: Until) -> None:
    put(store, "1", 1)
    hour = SubscriptionOptions(polling_delay=3_600.0)
    with store.subscribe("mailer", effect, options=hour) as subscription:
        until(lambda: effects(store) == [1])
        assert subscription.stop(60.0)


def test_a_subscription_that_is_stopped_in_its_handler_does_not_wait_for_its_next_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "1", 1)
    stop, waits = threading.Event(), list[float]()
    subscription = store.subscribe("mailer", lambda *_: stop.set(), background=False)
    monkeypatch.setattr(subscription._wake, "wait", waits.append)
    subscription.run(stop)
    assert waits == []


def test_a_subscription_that_was_stopped_hears_of_no_more_appends(platform: EventSQL) -> None:
    listener = platform.store.listener
    assert listener is not None
    with platform.store.subscribe("mailer", lambda *_: None) as subscription:
        assert subscription.stop(PATIENCE)
    assert listener._callbacks == {}


def test_a_handler_may_stop_its_subscription(store: Store, until: Until) -> None:
    def stop_after(change: RecordedChange, connection: Connection) -> None:
        effect(change, connection)
        assert subscription.stop()

    put(store, "1", 1, 2)
    with subscribed(store, stop_after, batch=1) as subscription:
        subscription.start()
        until(lambda: not subscription.running)
    assert effects(store) == [1]


def test_a_subscription_that_is_started_again_while_it_stops_goes_on(store: Store, until: Until) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(change: RecordedChange, connection: Connection) -> None:
        begun.set()
        assert go_on.wait(60)
        effect(change, connection)

    put(store, "1", 1)
    with store.subscribe("mailer", slow) as subscription:
        assert begun.wait(60)
        first = subscription._thread
        assert not subscription.stop(0.0)
        subscription.start()
        go_on.set()
        until(lambda: first is not None and not first.is_alive())
        put(store, "1", 2)
        until(lambda: effects(store) == [1, 2])


def test_a_platform_that_is_closed_stops_its_subscriptions(platform: EventSQL, until: Until) -> None:
    handling, go_on = threading.Event(), threading.Event()

    def slow(change: RecordedChange, connection: Connection) -> None:
        handling.set()
        assert go_on.wait(60.0)
        connection.execute("INSERT INTO public.effects (n) VALUES (%s)", [change.data["n"]])

    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effects (n int)")
    first = platform.store.subscribe("mailer", slow)
    second = platform.store.subscribe("billing", lambda _change, _connection: None)
    put(platform.store, "1", 7)
    assert handling.wait(60.0)

    assert not platform.store.close(0.0)
    go_on.set()
    assert platform.close()
    assert not first.running
    assert not second.running
    with platform.open().database.connection() as connection:
        assert connection.execute("SELECT n FROM public.effects").fetchall() == [(7,)]

    with platform.store.subscribe("mailer", slow) as third:
        put(platform.store, "1", 8)
        until(lambda: platform.store.subscriptions()[1].handled == 2)
        assert third.running


def test_a_store_that_is_closed_waits_for_its_subscriptions_together(store: Store, until: Until) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(_change: RecordedChange, _connection: Connection) -> None:
        begun.release()
        assert go_on.wait(2 * PATIENCE)

    put(store, "1", 1)
    both = [store.subscribe(name, slow) for name in ("mailer", "billing")]
    for _ in both:
        assert begun.acquire(timeout=PATIENCE)
    closing = in_thread("close", lambda: store.close(3_600.0))
    until(lambda: all(each._stop.is_set() for each in both))
    go_on.set()
    assert closing.result(PATIENCE)


def test_a_deleted_subscription_says_so(store: Store) -> None:
    subscription = subscribed(store)
    store.unsubscribe("mailer")
    with pytest.raises(SubscriptionNotFoundError):
        subscription.run_once()
    with pytest.raises(SubscriptionNotFoundError):
        store.unsubscribe("mailer")


@pytest.fixture
def halfway(store: Store) -> Subscription:
    adopted(store.database, 2)
    subscription = subscribed(store, batch=3)
    put(store, "1", 3, 4)
    put(store, "2", 5, 6)
    assert subscription.run_once().handled == 3
    return subscription


def test_a_subscription_goes_on_where_it_stood_in_a_restored_store(store: Store, halfway: Subscription) -> None:
    restored(store.database)
    with pytest.raises(DatabaseError, match="eventsql store adopt"):
        halfway.run_once()
    assert store.adopt().subscriptions == 1
    put(store, "3", 7)
    assert drain(halfway) == 4
    assert effects(store) == [1, 2, 3, 4, 5, 6, 7]


def test_a_subscription_among_the_changes_of_an_earlier_server_stays_there_in_another_restored_store(
    store: Store,
) -> None:
    adopted(store.database, 4)
    subscription = subscribed(store, batch=2)
    subscription.run_once()
    put(store, "1", 5)
    restored(store.database)
    assert store.adopt().subscriptions == 0
    assert drain(subscription) == 3
    assert effects(store) == [1, 2, 3, 4, 5]


def test_the_lag_is_that_of_the_changes_of_this_server_and_of_an_earlier_one(store: Store) -> None:
    def lag() -> tuple[int, int]:
        """The changes that wait, and the minutes since the oldest of them."""
        (found,) = store.subscriptions()
        return found.waiting, round(found.seconds / 60)

    adopted(store.database, 4)
    put(store, "1", 5)
    put(store, "1", 6)
    subscription = subscribed(store, batch=2)
    with store.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.aggregate_change "
            "SET eql_created_at = now() - make_interval(hours => 10 - (eql_data ->> 'n')::int)"
        )
    found = [lag()]
    while subscription.run_once().handled:
        found.append(lag())
    assert found == [(6, 540), (4, 420), (2, 300), (0, 0)]


def test_a_handler_that_would_never_run_is_refused(store: Store) -> None:
    async def later(change: RecordedChange, connection: Connection) -> None: ...

    for wrong in (later, None, lambda: None):
        with pytest.raises(ValidationError):
            subscribed(store, wrong)
    for options in ({"batch": 0}, {"max_attempts": 0}, {"polling_delay": 0.0}):
        with pytest.raises(ValidationError):
            SubscriptionOptions(**options)
    assert store.subscriptions() == []
