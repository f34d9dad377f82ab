"""A failing event holds up itself alone, is tried again with growing pauses, and then leaves the way or blocks it."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import psycopg
import pytest
from psycopg.rows import dict_row

from eventsql_orchestration import (
    AtOffset,
    Consumer,
    Event,
    EventFilter,
    EventSQL,
    Publication,
    Topic,
    model,
)
from eventsql_orchestration.consuming import failures, tracebacks
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.commit_retry import CommitRetryLimits
from eventsql_orchestration.consuming.dead_letter_values import DeadLetterCause, DeadLetterFactory, dead_letter
from eventsql_orchestration.consuming.handlers import BatchHandler
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.notifications import LOG
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumptionError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
)
from tests.consuming.conftest import state_of
from tests.effects import FullDiskError, effects, make_table, write
from tests.fixtures import Terminate, Until
from tests.forms import in_blocks, stored


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=3)
    make_table(platform)
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key="k", metadata={"source": "web"}) for number in range(1, 11)
    )
    platform.transfer.run_once()


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture(autouse=True)
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that failed is due again when the test says so."""
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 1e6)
    monkeypatch.setattr(failures, "MAX_BACKOFF", 60e6)


class Broken:
    """A handler that writes effects and fails at some events."""

    def __init__(self, *broken: int, error: Exception | None = None) -> None:
        self.broken = set(broken)
        self.error = error or ValueError("no such customer")
        self.calls: list[list[int]] = []

    def __call__(self, events: Sequence[Event], connection: Connection) -> None:
        self.calls.append([event.id for event in events])
        for event in events:
            write([event], connection)
            if event.id in self.broken:
                raise self.error


def consume(platform: EventSQL, handler: Callable[[Sequence[Event], Connection], object]) -> int:
    return platform.consumers.consume_once("orders", "mailer", handler)


def make_due(platform: EventSQL) -> None:
    """Let the pause before the next attempt have passed."""
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() WHERE eql_retry_at IS NOT NULL")


def pause_of(platform: EventSQL) -> float:
    """Seconds until the next attempt."""
    with platform.database.connection() as connection:
        row = connection.execute(
            "SELECT extract(epoch FROM eql_retry_at - clock_timestamp())::float8 FROM eventsql.consumer "
            "WHERE eql_topic = 'orders' AND eql_name = 'mailer'"
        ).fetchone()
    assert row is not None
    return float(row[0])


def spent(platform: EventSQL) -> None:
    """Let the first failure of an event be its last attempt."""
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_max_attempts = 1")


def block(platform: EventSQL, handler: Broken) -> None:
    for _ in range(3):
        consume(platform, handler)
        make_due(platform)


# Isolation


def test_a_batch_that_fails_is_handed_over_one_by_one_and_only_the_event_that_fails_is_held_up(
    platform: EventSQL,
) -> None:
    handler = Broken(4)
    assert consume(platform, handler) == 3
    assert handler.calls == [list(range(1, 11)), [1], [2], [3], [4]]
    assert effects(platform) == [1, 2, 3]
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.attempts) == (3, 4, 1)
    assert state.failure == "ValueError: no such customer"


def test_events_after_a_failed_event_wait_for_it(platform: EventSQL) -> None:
    handler = Broken(4)
    consume(platform, handler)
    handler.broken.clear()
    handler.calls.clear()
    assert consume(platform, handler) == 0
    assert handler.calls == []
    make_due(platform)
    assert consume(platform, handler) == 7
    # The event may fail again, so no call has it together with others.
    assert handler.calls == [[event_id] for event_id in range(4, 11)]
    assert effects(platform) == list(range(1, 11))
    state = state_of(platform)
    assert (state.failed_event_id, state.attempts, state.failure, state.retry_at) == (None, 0, None, None)


def test_a_statement_that_fails_in_the_handler_costs_its_event_alone(platform: EventSQL) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            write([event], connection)
            connection.execute("SELECT 1 / (%s - 4)", (event.id,))

    assert consume(platform, handle) == 3
    assert effects(platform) == [1, 2, 3]
    assert state_of(platform).failure == "DivisionByZero: division by zero"


def test_a_handler_that_swallows_the_error_of_a_statement_has_failed_all_the_same(platform: EventSQL) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            write([event], connection)
            try:
                connection.execute("SELECT 1 / (%s - 4)", (event.id,))
            except psycopg.Error:
                return

    assert consume(platform, handle) == 3
    assert effects(platform) == [1, 2, 3]
    assert "broke the transaction" in (state_of(platform).failure or "")


def test_a_handler_that_rolls_back_has_failed_and_its_event_does_not_pass_without_effects(platform: EventSQL) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if events[-1].id >= 4:
            raise psycopg.Rollback

    assert consume(platform, handle) == 3
    assert effects(platform) == [1, 2, 3]
    assert state_of(platform).failed_event_id == 4


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ABORT; BEGIN"])
def test_a_handler_that_ends_the_transaction_is_stopped_at_once_and_the_offset_stays(
    platform: EventSQL, ending: str
) -> None:
    calls: list[int] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        calls.append(len(events))
        connection.execute(ending.encode())

    with pytest.raises(DatabaseError, match=r"the handler ended or broke the transaction|savepoint .* does not exist"):
        consume(platform, handle)
    # Without the lock on its partition it must not go on, not even one by one.
    assert calls == [10]
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.consumed_events) == (0, None, 0)
    assert consume(platform, write) == 10


@pytest.mark.parametrize("fails", [True, False])
def test_a_stream_that_a_handler_leaves_open_stops_the_handler_alone(platform: EventSQL, fails: bool) -> None:
    kept: list[object] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        rows = connection.cursor().stream("SELECT FROM generate_series(1, 3)")
        next(rows)
        if fails:
            # The frames of the error refer to the stream.
            raise ValueError("no such customer")
        kept.append(rows)

    assert consume(platform, handle) == 0
    state = state_of(platform)
    assert state.failed_event_id == 1
    assert ("no such customer" if fails else "the handler ended or broke the transaction") in str(state.failure)
    make_due(platform)
    while state_of(platform).last_event_id < 10:
        assert consume(platform, write)


def consume_all(platform: EventSQL, way: str, handler: BatchHandler, *, most: int) -> None:
    """Consume the ten events, `most` at a time, by a claim or without, as often as it takes."""
    while state_of(platform).last_event_id < 10:
        if way == "claim":
            claim = platform.claims.claim("orders", "mailer", owner="me")
            assert isinstance(claim, Claim)
            platform.claims.process(claim, handler, batch=most)
        else:
            platform.consumers.consume_once("orders", "mailer", handler, max_events=most)
        make_due(platform)


@pytest.fixture
def _deferred(platform: EventSQL) -> None:
    """What handlers write is checked when it is committed: effects may not be of event 4, and need a parent."""
    with platform.database.connection() as connection:
        connection.execute(
            """
            CREATE TABLE parents (id bigint PRIMARY KEY);
            ALTER TABLE effects ADD FOREIGN KEY (event_id) REFERENCES parents DEFERRABLE INITIALLY DEFERRED;
            """
        )


def write_child_first(events: Sequence[Event], connection: Connection) -> None:
    """Event 4 never gets its parent."""
    write(events, connection)
    for event in events:
        if event.id != 4:
            connection.execute("INSERT INTO parents VALUES (%s)", (event.id,))


@pytest.mark.usefixtures("_deferred")
@pytest.mark.parametrize("way", ["batch", "each", "claim"])
def test_a_rejected_commit_is_the_failure_of_its_event_alone(platform: EventSQL, way: str) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))

    consume_all(platform, way, write_child_first, most={"claim": 6, "each": 1, "batch": 1_000}[way])
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("orders")
    assert letter.metadata["dlt_attempts"] == "3"
    assert letter.metadata["dlt_exception"].endswith("ForeignKeyViolation")


@pytest.mark.usefixtures("_deferred")
def test_a_conflicting_commit_is_tried_again_and_no_event_is_blamed(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute(
            """
            CREATE SEQUENCE tries;
            CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('tries') = 1 THEN
                    RAISE EXCEPTION 'could not serialize' USING ERRCODE = 'serialization_failure';
                END IF;
                RETURN NULL;
            END $$;
            CREATE CONSTRAINT TRIGGER conflict AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION conflict();
            """
        )

    def handle(events: Sequence[Event], connection: Connection) -> None:
        connection.execute("SET CONSTRAINTS ALL DEFERRED")
        for event in events:
            connection.execute("INSERT INTO parents VALUES (%s)", (event.id,))
        write(events, connection)

    with pytest.raises(psycopg.errors.SerializationFailure):
        consume(platform, handle)
    assert effects(platform) == []
    assert state_of(platform).failed_event_id is None
    assert consume(platform, handle) == 10
    assert effects(platform) == list(range(1, 11))


@pytest.fixture
def refusing(platform: EventSQL) -> Callable[[str, str], None]:
    """Has each commit refused whose effects meet a condition, with a SQLSTATE: no check before the commit says so."""

    def refuse(condition: str, state: str) -> None:
        with platform.database.connection() as connection:
            connection.execute(
                f"""
                CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                    IF {condition} AND EXISTS (
                        SELECT FROM eventsql.consumer WHERE eql_last_event_id = (SELECT max(event_id) FROM effects)
                    ) THEN
                        RAISE EXCEPTION 'refused' USING ERRCODE = '{state}';
                    END IF;
                    RETURN NULL;
                END $$;
                CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
                    FOR EACH ROW EXECUTE FUNCTION refuse();
                """
            )

    return refuse


@pytest.mark.parametrize(
    ("way", "state"),
    [("batch", "23514"), ("batch", "40002"), ("batch", "55000"), ("batch", "P0001"), ("claim", "23514")],
)
def test_a_rejection_that_only_the_commit_shows_is_the_failure_of_its_event(
    platform: EventSQL, refusing: Callable[[str, str], None], way: str, state: str
) -> None:
    """The trigger looks at the offset, which moves after all events were handled and checked one by one."""
    platform.registry.register_topic(Topic("orders_dlt"))
    refusing("NEW.event_id = 4", state)

    consume_all(platform, way, write, most=4)
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("orders")
    assert letter.metadata["dlt_attempts"] == "3"


@pytest.mark.parametrize("state", ["40001", "57014", "55P03"])
def test_a_commit_that_never_stops_conflicting_ends_as_the_failure_of_its_event(
    platform: EventSQL, refusing: Callable[[str, str], None], state: str
) -> None:
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(attempts=3, seconds=0.0)
    refusing("NEW.event_id = 1", state)
    # Twice with the others, and twice alone.
    for _ in range(4):
        with pytest.raises((psycopg.Error, DatabaseBusyError)):
            consume(platform, write)
        assert state_of(platform).failed_event_id is None
    assert consume(platform, write) == 0
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (1, 1)
    make_due(platform)
    # Nobody waits for what has not passed before.
    assert consume(platform, write) == 0
    assert state_of(platform).attempts == 2
    assert effects(platform) == []


def test_an_event_whose_commit_never_stops_conflicting_is_found_among_many_at_once(
    platform: EventSQL, refusing: Callable[[str, str], None]
) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(attempts=2, seconds=0.0)
    refusing("NEW.event_id = 6", "57014")
    refused = 0
    while state_of(platform).failed_event_id is None:
        try:
            # Each turn gets some events on, or counts.
            assert consume(platform, write) or state_of(platform).failed_event_id == 6
        except (psycopg.Error, DatabaseBusyError):
            refused += 1
    assert refused == 2, "once with the others, once alone"
    assert effects(platform) == [1, 2, 3, 4, 5]
    assert state_of(platform).attempts == 1
    for _ in range(2):
        make_due(platform)
        consume(platform, write)
    while state_of(platform).last_event_id < 10:
        assert consume(platform, write)
    assert effects(platform) == [1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_an_event_is_given_its_own_time_whatever_became_of_those_before_it(
    platform: EventSQL, refusing: Callable[[str, str], None]
) -> None:
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(attempts=2, seconds=0.0)
    platform.registry.register_topic(Topic("orders_dlt"))
    refusing("NEW.event_id IN (1, 2)", "55P03")
    blamed: list[int] = []
    while state_of(platform).last_event_id < 10:
        with suppress(psycopg.Error, DatabaseBusyError):
            consume(platform, write)
            blamed.append(state_of(platform).failed_event_id or 0)
        make_due(platform)
    assert [event for event in blamed if event] == [1, 1, 2, 2]
    assert effects(platform) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_conflicts_that_come_fast_are_not_held_against_an_event(
    platform: EventSQL, refusing: Callable[[str, str], None]
) -> None:
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(attempts=2, seconds=3_600.0)
    refusing("true", "40001")
    for _ in range(5):
        with pytest.raises(psycopg.errors.SerializationFailure):
            consume(platform, write)
    assert state_of(platform).failed_event_id is None


@pytest.mark.parametrize(
    ("state", "error"),
    [("53100", DatabaseFullError), ("54000", psycopg.errors.ProgramLimitExceeded), ("XX001", DatabaseError)],
    ids=["a full disk", "a full queue of notifications", "a damaged file"],
)
def test_an_unrelated_error_of_the_commit_is_never_the_failure_of_an_event(
    platform: EventSQL, refusing: Callable[[str, str], None], state: str, error: type[Exception]
) -> None:
    platform.shards[0].consumers.commit_retry = CommitRetryLimits(attempts=1, seconds=0.0)
    refusing("true", state)
    for _ in range(3):
        with pytest.raises(error):
            consume(platform, write)
    assert state_of(platform).failed_event_id is None


def test_a_full_disk_is_never_the_failure_of_an_event(platform: EventSQL) -> None:
    def find_it_full(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        if events[-1].id > 4:
            raise FullDiskError

    with pytest.raises(DatabaseFullError):
        for _ in range(20):
            consume(platform, find_it_full)
    assert effects(platform) == [1, 2, 3, 4]
    assert state_of(platform).failed_event_id is None
    while consume(platform, write):
        pass
    assert effects(platform) == list(range(1, 11))


@pytest.mark.parametrize("begin", ["BEGIN", "SAVEPOINT mine", "SAVEPOINT mine; RELEASE mine"])
def test_a_handler_that_begins_something_and_fails_costs_its_event_alone(platform: EventSQL, begin: str) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        connection.execute(begin.encode())
        for event in events:
            write([event], connection)
            if event.id == 4:
                raise ValueError

    assert consume(platform, handle) == 3
    assert effects(platform) == [1, 2, 3]
    assert state_of(platform).failed_event_id == 4


@pytest.mark.parametrize("failing", [ValueError, None])
@pytest.mark.parametrize("ending", ["COMMIT", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
def test_a_handler_that_commits_itself_may_repeat_effects_but_skips_no_event(
    platform: EventSQL, ending: str, failing: type[Exception] | None
) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        connection.execute(ending.encode())
        if failing is not None:
            raise failing

    with pytest.raises((DatabaseError, ValueError)):
        consume(platform, handle)
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.consumed_events) == (0, None, 0)
    with platform.database.connection() as connection:
        connection.execute("TRUNCATE effects")
    assert consume(platform, write) == 10
    assert effects(platform) == list(range(1, 11))


def test_a_handler_may_set_up_the_connection_as_it_likes(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    spent(platform)

    def handle(events: Sequence[Event], connection: Connection) -> None:
        connection.row_factory = dict_row  # type: ignore[assignment]  # as handlers do
        write(events, connection)
        if any(event.id == 4 for event in events):
            raise ValueError

    while consume(platform, handle):
        pass
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_handler_that_moves_the_offset_has_lost_its_partition_however_it_reads_rows(platform: EventSQL) -> None:
    def handle(_events: Sequence[Event], connection: Connection) -> None:
        connection.row_factory = dict_row  # type: ignore[assignment]  # as handlers do
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 7")

    with pytest.raises(ClaimLostError):
        consume(platform, handle)
    assert state_of(platform).last_event_id == 0


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("max_events", [1, 10])
def test_an_error_is_freed_with_its_events(platform: EventSQL, max_events: int) -> None:
    class Kept(Exception):  # noqa: N818 - what a weak reference can be to
        pass

    raised: list[weakref.ref[Exception]] = []
    kept: list[int] = []

    def fail() -> Exception:
        error = Kept("no such customer")
        raised.append(weakref.ref(error))
        return error

    def handle(_events: Sequence[Event], _connection: Connection) -> None:
        kept.append(sum(failure() is not None for failure in raised))
        raise fail()

    platform.consumers.consume_once("orders", "mailer", handle, max_events=max_events)
    # Neither while the batch is handled again, nor afterwards.
    assert kept == [0] * (1 if max_events == 1 else 2)
    assert [failure() for failure in raised] == [None] * len(kept)


def test_a_connection_that_is_lost_in_the_handler_is_not_the_events_failure(
    platform: EventSQL, terminate: Terminate
) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        terminate(connection)
        connection.execute("SELECT 1")

    with pytest.raises(DatabaseUnavailableError):
        consume(platform, handle)
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.attempts) == (0, None, 0)
    assert consume(platform, write) == 10
    assert effects(platform) == list(range(1, 11))


def test_a_handler_may_name_the_event_that_failed_and_why(platform: EventSQL) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        customers = {str(number): number for number in range(1, 11) if number != 4}
        for event in events:
            try:
                assert customers[str(event.id)] == event.id
            except KeyError as error:
                raise ConsumptionError(event) from error

    assert consume(platform, handle) == 3
    state = state_of(platform)
    assert (state.failed_event_id, state.failure) == (4, "KeyError: '4'")


def test_a_failure_of_any_text_can_be_noted(platform: EventSQL) -> None:
    assert consume(platform, Broken(1, error=ValueError("nul \x00, lone \ud800, long " + "x" * 10_000))) == 0
    failure = state_of(platform).failure or ""
    assert failure.startswith("ValueError: nul")
    assert len(failure) == 2_000


def test_the_failure_of_a_statement_has_its_line_and_no_pointer_below_it(platform: EventSQL) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        connection.execute("SELECT substr(1)")

    consume(platform, handle)
    failure = state_of(platform).failure or ""
    assert "LINE 1: SELECT substr(1)\nHINT:" in failure
    assert "^" not in failure


# Retry


def test_pauses_between_attempts_double_up_to_a_minute(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_max_attempts = 100")
    handler = Broken(1)
    for attempt in range(1, 10):
        consume(platform, handler)
        assert state_of(platform).attempts == attempt
        # The clock runs between the note and the look.
        assert pause_of(platform) == pytest.approx(1e6 * min(2 ** (attempt - 1), 60), rel=0.001)
        make_due(platform)


def test_an_event_that_fails_after_another_has_its_own_attempts(platform: EventSQL) -> None:
    handler = Broken(1, 2)
    consume(platform, handler)
    make_due(platform)
    consume(platform, handler)
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (1, 2)
    handler.broken.remove(1)
    make_due(platform)
    consume(platform, handler)
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (2, 1)


# The last attempt


def test_an_event_whose_attempts_are_spent_becomes_a_dead_letter_and_the_rest_goes_on(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    platform.registry.register_topic(Topic("orders_dlt", 2))
    handler = Broken(4)
    for consumed in (3, 0, 1, 6):
        assert consume(platform, handler) == consumed
        make_due(platform)
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert state_of(platform).last_event_id == 10
    assert state_of(platform).consumed_events == 10
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("orders")
    assert (letter.topic, letter.key, letter.value) == ("orders_dlt", "k", b"4")
    assert letter.metadata == {
        "source": "web",
        "dlt_consumer": "mailer",
        "dlt_exception": "ValueError",
        "dlt_message": "no such customer",
        "dlt_attempts": "3",
        "dlt_topic": "orders",
        "dlt_partition": "-1",
        "dlt_offset": "4",
    }
    assert [record.levelno for record in caplog.records if "gave event 4 up" in record.getMessage()] == [logging.ERROR]


def test_the_log_has_the_traceback_of_an_events_first_attempt_and_of_its_last_one(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_events: Sequence[Event], _connection: Connection) -> None:
        # JSON may have half of a character: a log in UTF-8 would lose the line.
        raise ValueError("\ud800" + "e" * tracebacks.MAX_LENGTH)

    for _ in range(3):
        consume(platform, refuse)
        make_due(platform)
    shown = [record.exc_text for record in caplog.records if "event 1" in record.getMessage()]
    assert [text and text.count("in refuse") for text in shown] == [1, None, 1]
    # Each line has the error as one of at most 2,000 characters, too.
    assert len(caplog.text.encode()) < 3 * 2_500 + 2 * 1.1 * tracebacks.MAX_LENGTH


def test_a_dead_letter_and_the_offset_behind_it_are_one_transaction(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    spent(platform)
    bury = platform.shards[0].dead_letters.bury

    def interrupted(*arguments: object, **options: object) -> None:
        bury(*arguments, **options)  # type: ignore[arg-type]  # as they came
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(platform.shards[0].dead_letters, "bury", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consume(platform, Broken(1))
    assert (platform.transfer.run_once(), state_of(platform).last_event_id) == ({}, 0)
    assert consume(platform, Broken(1)) == 1
    assert platform.transfer.run_once() == {"orders_dlt": 1}


ODD_METADATA: dict[str, dict[str, str]] = {
    '{"tries": 2, "tags": ["a"]}': {"tries": "2", "tags": '["a"]'},
    r'{"half": "\ud800", "\udc00": "\u0000"}': {"half": "?", "?": "\N{REPLACEMENT CHARACTER}"},
    "[1]": {"eventsql_unreadable": "[1]"},
    "null": {"eventsql_unreadable": "null"},
    '{"digits": ' + "1" * 5_000 + "}": {"eventsql_unreadable": '{"digits": ' + "1" * 5_000 + "}"},
}
"""Metadata that another program may write, and the texts that a dead letter has of them."""


@pytest.mark.parametrize("metadata", ODD_METADATA)
def test_metadata_of_other_publishers_hold_up_no_consumer(platform: EventSQL, metadata: str) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    picky = EventFilter(metadata={"source": "web"})
    platform.registry.register_consumer(Consumer("orders", "picky"), filter=picky)
    spent(platform)
    with platform.database.connection() as connection:
        written = "array_fill(%s::json, ARRAY[eql_events])" if in_blocks() else "%s::json"
        statement = f"UPDATE eventsql.{stored('orders')} SET eql_metadata = {written}"
        connection.execute(statement.encode(), [metadata])
    assert consume(platform, Broken(1)) == 1
    assert consume(platform, Broken()) == 9
    assert platform.consumers.consume_once("orders", "picky", Broken(*range(1, 11))) == 0
    assert platform.registry.consumer("orders", "picky")[0].last_event_id == 10
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("orders")
    assert {name: text for name, text in letter.metadata.items() if not name.startswith("dlt_")} == (
        ODD_METADATA[metadata]
    )


def test_without_a_dead_letter_topic_the_partition_stops_loudly_and_says_where(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Broken(4)
    block(platform, handler)
    handler.calls.clear()
    for _ in range(3):
        assert consume(platform, handler) == 0
    assert handler.calls == []
    assert effects(platform) == [1, 2, 3]
    (lag,) = platform.lag("orders")
    assert lag.cause == LagCause.BLOCKED
    assert "event 4 failed 3 of 3 times: ValueError: no such customer" in lag.detail
    (said,) = [record for record in caplog.records if "blocked by event 4" in record.getMessage()]
    assert said.levelno == logging.ERROR
    assert "orders_dlt" in said.getMessage()


def test_a_blocked_partition_goes_on_when_the_consumer_is_resumed_with_all_attempts_again(platform: EventSQL) -> None:
    handler = Broken(4)
    block(platform, handler)
    platform.registry.resume("orders", "mailer")
    assert consume(platform, handler) == 0
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (4, 1)
    handler.broken.clear()
    make_due(platform)
    assert consume(platform, handler) == 7
    assert effects(platform) == list(range(1, 11))


def test_a_blocked_partition_goes_on_when_its_dead_letter_topic_is_made(platform: EventSQL) -> None:
    handler = Broken(4)
    block(platform, handler)
    platform.registry.register_topic(Topic("orders_dlt"))
    assert consume(platform, handler) == 1
    assert consume(platform, handler) == 6
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    platform.transfer.run_once()
    assert [letter.metadata["dlt_offset"] for letter in platform.dead_letters.list("orders")] == ["4"]


def test_an_event_that_another_consumption_passed_blocks_nothing_any_more(platform: EventSQL) -> None:
    block(platform, Broken(4))
    with platform.database.connection() as connection:
        # As EventSQL's Java library does, which knows nothing of attempts.
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 5 WHERE eql_topic = 'orders'")
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() + interval '1 hour'")
    (lag,) = platform.lag("orders")
    assert (lag.events, lag.cause) == (5, LagCause.WAITING)
    assert consume(platform, Broken(7)) == 1
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (7, 1)


# A dead letter factory


def test_a_factory_decides_what_becomes_of_an_event_that_is_given_up(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("graveyard"))
    seen: list[tuple[Event, DeadLetterCause]] = []

    def factory(event: Event, cause: DeadLetterCause) -> Publication:
        seen.append((event, cause))
        return replace(dead_letter(event, cause), topic="graveyard", key=f"was {event.key}")

    platform.dead_letters.configure(factory)
    handler = Broken(4)
    for consumed in (3, 0, 1, 6):
        assert consume(platform, handler) == consumed
        make_due(platform)
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    ((event, cause),) = seen
    assert event.id == 4
    assert cause == DeadLetterCause("mailer", "ValueError", "no such customer", 3, handler.error)
    platform.transfer.run_once()
    (letter,) = platform.reader.read("graveyard")
    assert (letter.key, letter.value, letter.metadata["dlt_offset"]) == ("was k", b"4", "4")


def test_removing_the_factory_restores_the_default(platform: EventSQL) -> None:
    spent(platform)
    platform.dead_letters.configure(lambda _event, _cause: None)
    platform.dead_letters.configure(None)
    platform.registry.register_topic(Topic("orders_dlt"))
    assert consume(platform, Broken(1)) == 1


def test_if_the_factory_makes_no_dead_letter_the_partition_stops_until_it_is_resumed(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    spent(platform)
    # That there is a topic for dead letters makes no difference.
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.dead_letters.configure(lambda _event, _cause: None)
    handler = Broken(4)
    assert consume(platform, handler) == 3
    handler.calls.clear()
    for _ in range(3):
        assert consume(platform, handler) == 0
    assert handler.calls == []
    assert state_of(platform).last_event_id == 3
    (lag,) = platform.lag("orders")
    assert (lag.cause, lag.detail) == (
        LagCause.BLOCKED,
        "event 4 failed 1 of 1 times: ValueError: no such customer",
    )
    (said,) = [record for record in caplog.records if "blocked by event 4" in record.getMessage()]
    assert said.levelno == logging.ERROR
    assert "resume the consumer" in said.getMessage()
    refusal = platform.claims.claim("orders", "mailer", owner="me")
    assert isinstance(refusal, NoClaim)
    assert refusal.reason == (
        "event 4 blocks the partition: it failed once (ValueError: no such customer) "
        "and the dead letter factory made no dead letter of it"
    )
    handler.broken.clear()
    platform.registry.resume("orders", "mailer")
    assert consume(platform, handler) == 7
    assert effects(platform) == list(range(1, 11))


def test_a_partition_that_a_factory_may_unblock_goes_on_without_a_dead_letter_topic(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("graveyard"))
    block(platform, Broken(4))
    assert consume(platform, Broken(4)) == 0
    platform.dead_letters.configure(lambda event, _cause: event.as_publication("graveyard"))
    assert isinstance(platform.claims.claim("orders", "mailer", owner="me", lease=0.001), Claim)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now()")
    assert consume(platform, Broken(4)) == 1
    assert consume(platform, Broken(4)) == 6


def a_factory_that_raises(event: Event, cause: DeadLetterCause) -> Publication:
    raise LookupError(f"no address for {event.id}")


def a_factory_that_rolls_back(event: Event, cause: DeadLetterCause) -> Publication:
    raise psycopg.OperationalError("another database is down")


def a_factory_for_a_topic_that_is_missing(event: Event, cause: DeadLetterCause) -> Publication:
    return event.as_publication("nowhere")


def a_factory_for_a_partition_that_is_missing(event: Event, cause: DeadLetterCause) -> Publication:
    return replace(event.as_publication("orders"), partition=7)


def a_factory_that_gives_anything(event: Event, cause: DeadLetterCause) -> Publication:
    return "a letter"  # type: ignore[return-value]  # as careless callers do


@pytest.mark.parametrize(
    ("factory", "noted"),
    [
        (a_factory_that_raises, "LookupError: no address for 4"),
        (a_factory_that_rolls_back, "OperationalError: another database is down"),
        (a_factory_for_a_topic_that_is_missing, "TopicNotFoundError: topic 'nowhere' does not exist"),
        (a_factory_for_a_partition_that_is_missing, "PartitionOutOfRangeError: partition 7"),
        (a_factory_that_gives_anything, "ValidationError: a dead letter factory gives a Publication or None, not str"),
    ],
)
def test_an_event_whose_dead_letter_cannot_be_made_is_kept_and_tried_again(
    platform: EventSQL, caplog: pytest.LogCaptureFixture, factory: DeadLetterFactory, noted: str
) -> None:
    spent(platform)
    platform.dead_letters.configure(factory)
    handler = Broken(4)
    assert consume(platform, handler) == 3
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.attempts) == (3, 4, 1)
    failure = state.failure or ""
    assert failure.startswith(f"ValueError: no such customer (its dead letter could not be made: {noted}")
    assert failure.endswith(")")
    (said,) = [record for record in caplog.records if "held up by event 4" in record.getMessage()]
    assert said.levelno == logging.ERROR
    assert consume(platform, handler) == 0, "it is not due yet"
    make_due(platform)
    assert consume(platform, handler) == 0
    assert state_of(platform).attempts == 2
    assert platform.transfer.run_once() == {}
    make_due(platform)
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.dead_letters.configure(None)
    assert consume(platform, handler) == 1
    assert consume(platform, handler) == 6
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert platform.transfer.run_once() == {"orders_dlt": 1}


def test_an_event_whose_dead_letter_the_server_refuses_is_kept_and_tried_again(
    platform: EventSQL, session: Connection
) -> None:
    spent(platform)
    platform.registry.register_topic(Topic("orders_dlt"))
    session.execute("ALTER TABLE eventsql.event_buffer ADD CONSTRAINT no_letter CHECK (eql_topic <> 'orders_dlt')")
    assert consume(platform, Broken(4)) == 3
    state = state_of(platform)
    assert (state.last_event_id, state.failed_event_id, state.attempts) == (3, 4, 1)
    session.execute("ALTER TABLE eventsql.event_buffer DROP CONSTRAINT no_letter")
    make_due(platform)
    assert consume(platform, Broken(4)) == 1
    assert platform.transfer.run_once() == {"orders_dlt": 1}


def test_an_event_that_is_too_large_for_a_dead_letter_is_passed_over_as_its_failure_advises(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody inserted it into the buffer by hand."""
    spent(platform)
    platform.registry.register_topic(Topic("orders_dlt"))
    monkeypatch.setattr(model, "MAX_VALUE_BYTES", 0)
    assert consume(platform, Broken(4)) == 3
    failure = state_of(platform).failure or ""
    assert "InvalidPublicationError" in failure
    assert "`eventsql seek`" in failure
    platform.seeker.execute("orders", "mailer", AtOffset(5))
    assert consume(platform, Broken(4)) == 6


def test_both_failures_are_noted_however_long_they_are(platform: EventSQL) -> None:
    spent(platform)

    def factory(event: Event, cause: DeadLetterCause) -> Publication:
        raise LookupError("y" * 10_000)

    platform.dead_letters.configure(factory)
    consume(platform, Broken(1, error=ValueError("x" * 10_000)))
    failure = state_of(platform).failure or ""
    assert len(failure) == 2_000
    assert failure.startswith("ValueError: xxx")
    assert "LookupError: yyy" in failure


def test_a_dead_letter_whose_commit_is_rejected_is_an_error_and_not_tried_without_end(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    session.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no letters'; END $$; "
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON eventsql.event_buffer DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    with pytest.raises(psycopg.errors.RaiseException):
        consume(platform, Broken(1))
    session.execute("DROP FUNCTION refuse CASCADE")
    assert consume(platform, Broken(1)) == 1


def test_a_connection_that_is_lost_while_a_dead_letter_is_made_costs_nothing(platform: EventSQL, dsn: str) -> None:
    spent(platform)
    platform.registry.register_topic(Topic("orders_dlt"))

    def factory(event: Event, cause: DeadLetterCause) -> Publication:
        with psycopg.connect(dsn, autocommit=True) as killer:
            killer.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state = 'idle in transaction'"
            )
        return dead_letter(event, cause)

    platform.dead_letters.configure(factory)
    with pytest.raises(DatabaseUnavailableError):
        consume(platform, Broken(4))
    assert (state_of(platform).last_event_id, state_of(platform).attempts) == (0, 0)
    platform.dead_letters.configure(None)
    assert consume(platform, Broken(4)) == 4


def test_the_events_behind_a_dead_letter_wait_for_no_notification(platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    unsubscribe = platform.listener.subscribe(LOG, "orders", lambda: None)
    until(lambda: platform.listener.listening)
    with platform.consumers.start_batch("orders", "mailer", Broken(4), polling_delay=1e6):
        until(lambda: state_of(platform).last_event_id == 10)
    unsubscribe()


@pytest.mark.parametrize(
    "error", [LookupError("no"), psycopg.Rollback(), SystemExit(2), asyncio.CancelledError()], ids=repr
)
def test_a_consumption_outlives_a_factory_that_fails(platform: EventSQL, until: Until, error: BaseException) -> None:
    spent(platform)
    platform.registry.register_topic(Topic("orders_dlt"))
    problems = iter((error,))

    def factory(event: Event, cause: DeadLetterCause) -> Publication:
        for problem in problems:
            raise problem
        return dead_letter(event, cause)

    platform.dead_letters.configure(factory)
    with platform.consumers.start_batch("orders", "mailer", Broken(4), polling_delay=0.01):
        until(lambda: "could not be made" in (state_of(platform).failure or ""))
        make_due(platform)
        until(lambda: state_of(platform).last_event_id == 10)
    assert effects(platform) == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_consumption_goes_on_when_a_partition_that_its_factory_stopped_is_resumed(
    platform: EventSQL, until: Until
) -> None:
    spent(platform)
    platform.dead_letters.configure(lambda _event, _cause: None)
    handler = Broken(4)
    with platform.consumers.start_batch("orders", "mailer", handler, polling_delay=0.01):
        until(lambda: state_of(platform).spent)
        handler.broken.clear()
        platform.registry.resume("orders", "mailer")
        until(lambda: state_of(platform).last_event_id == 10)
    assert effects(platform) == list(range(1, 11))
