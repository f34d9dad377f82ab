"""`eventsql.fetch` and `eventsql.commit` do in SQL what the library's claims do: in psql, in Java."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventFilter, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.consuming.failures import backoff_after
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.model import BLOCKS, ROWS, Storage
from eventsql_orchestration.storage import compacting, erasing
from tests.effects import effects, make_table
from tests.fixtures import Sessions, UntilBlocked
from tests.forms import ids_in, stored

if TYPE_CHECKING:
    from tests.languages.conftest import Psql

FETCH = "SELECT claim, epoch, partition, id, key, value, metadata, published_at FROM eventsql.fetch"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=2)
    make_table(platform)


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="topic")


@pytest.fixture
def topic(platform: EventSQL) -> EventSQL:
    return platform


def fill(platform: EventSQL, count: int, topic: str = "orders") -> None:
    platform.publisher.publish_all(
        [Publication(topic, b"%d" % n, key=str(n % 7), metadata={"n": str(n)}) for n in range(count)]
    )
    platform.transfer.run_once()


def fetch(connection: Connection, arguments: str = "'orders', 'mailer'") -> list[Any]:
    return connection.execute(f"{FETCH}({arguments})".encode()).fetchall()


def call(connection: Connection, function: str, *values: object) -> Any:
    places = ", ".join(["%s"] * len(values))
    row = connection.execute(f"SELECT eventsql.{function}({places})".encode(), values).fetchone()
    assert row is not None
    return row[0]


def offsets(platform: EventSQL, consumer: str = "mailer") -> dict[int, int]:
    return {state.partition: state.last_event_id for state in platform.registry.consumer("orders", consumer)}


def let_be_due(connection: Connection) -> None:
    connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() - interval '1 s'")


def let_expire(connection: Connection) -> None:
    connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s'")


@pytest.mark.both_forms
@pytest.mark.parametrize("partitioned", [True, False])
def test_each_event_is_fetched_once_as_the_library_reads_it(
    topic: EventSQL, session: Connection, *, partitioned: bool
) -> None:
    if not partitioned:
        topic.registry.register_consumer(Consumer("orders", "whole"))
    consumer = "mailer" if partitioned else "whole"
    fill(topic, 50)
    fill(topic, 50)
    fetched = []
    while rows := fetch(session, f"'orders', '{consumer}', 7"):
        assert len(rows) <= 7
        with session.transaction():
            for row in rows:
                session.execute("INSERT INTO effects (event_id) VALUES (%s)", [row[3]])
            call(session, "commit", rows[0][0], rows[0][1])
        fetched += rows
    read = topic.reader.read("orders")
    wanted = [(e.partition, e.id, e.key, e.value, dict(e.metadata), e.buffered_at) for e in read]
    assert sorted(row[2:] for row in fetched) == sorted(wanted)
    for partition in range(3):
        assert [row[3] for row in fetched if row[2] == partition] == ids_in(topic, "orders", partition)
    assert sorted(effects(topic)) == [event.id for event in read]
    assert sum(state.consumed_events for state in topic.registry.consumer("orders", consumer)) == 100
    began = session.execute("SELECT min(eql_first_event_id) FROM eventsql.consumer WHERE eql_name = %s", [consumer])
    assert began.fetchone() == (read[0].id,)
    assert all(lag.events == 0 for lag in topic.lag("orders") if lag.consumer == consumer)


def test_a_claim_keeps_the_library_away_until_its_lease_ends(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    ((claim, epoch, partition), *_) = [row[:3] for row in fetch(session, "'orders', 'mailer', 2, 60, 'till'")]
    found, state = topic.claims.get(claim)
    assert (found.owner, found.epoch, found.events, state) == ("process till", epoch, 2, "claimed")
    refused = topic.claims.claim("orders", "mailer", partition, owner="me")
    assert isinstance(refused, NoClaim)
    assert refused.leased_by == "process till"

    call(session, "renew", claim, epoch, 600.0)
    let_expire(session)
    taken = topic.claims.claim("orders", "mailer", partition, owner="me", max_events=1)
    assert isinstance(taken, Claim)
    for function in ("commit", "release", "renew"):
        with pytest.raises(psycopg.errors.NoDataFound):
            call(session, function, claim, epoch)
    assert offsets(topic)[partition] == 0
    with topic.database.transaction() as connection:
        topic.claims.commit(connection, taken)


def test_a_claim_that_the_library_adopts_is_lost(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    claim, epoch, *_ = fetch(session)[0]
    adopted = topic.claims.adopt(claim, owner="a run")
    with pytest.raises(psycopg.errors.NoDataFound):
        call(session, "commit", claim, epoch)
    call(session, "release", claim, adopted.epoch)
    with pytest.raises(psycopg.errors.NoDataFound):
        call(session, "commit", claim, adopted.epoch)
    with pytest.raises(ClaimLostError), topic.database.transaction() as connection:
        topic.claims.commit(connection, adopted)


def test_an_offset_that_another_consumption_moved_is_not_committed(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    claim, epoch, partition, first, *_ = fetch(session)[0]
    let_expire(session)
    session.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s WHERE eql_partition = %s", [first, partition])
    with pytest.raises(psycopg.errors.NoDataFound):
        call(session, "commit", claim, epoch)
    assert offsets(topic)[partition] == first


def test_a_commit_waits_for_a_fetch_that_takes_the_partition_over_and_is_refused_then(
    topic: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    fill(topic, 30)
    claim, epoch, partition, *_ = fetch(session)[0]
    let_expire(session)
    other = sessions()
    assert fetch(other)[0][2] == partition
    with ThreadPoolExecutor(1) as executor:
        committing = executor.submit(call, session, "commit", claim, epoch)
        until_blocked()
        other.commit()
        with pytest.raises(psycopg.errors.NoDataFound):
            committing.result()
    assert offsets(topic)[partition] == 0


def test_a_rolled_back_commit_leaves_the_claim(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    rows = fetch(session)
    claim, epoch, partition, *_ = rows[0]
    with session.transaction(force_rollback=True):
        call(session, "commit", claim, epoch)
    assert offsets(topic)[partition] == 0
    call(session, "commit", claim, epoch, rows[1][3])
    assert topic.claims.get(claim)[1] == "released", "the rest of its range is claimed anew"
    assert offsets(topic)[partition] == rows[1][3]
    with pytest.raises(psycopg.errors.NoDataFound):
        call(session, "commit", claim, epoch)
    while rows[0][2] != partition or rows[0][3] <= offsets(topic)[partition]:
        rows = fetch(session)
    assert rows[0][3] == ids_in(topic, "orders", partition)[2]


def test_fetchers_at_once_get_different_partitions(topic: EventSQL, sessions: Sessions) -> None:
    fill(topic, 30)
    open_ = [sessions() for _ in range(4)]
    for each in open_:
        each.autocommit = False
    fetched = [fetch(each) for each in open_]
    assert {rows[0][2] for rows in fetched[:3]} == {0, 1, 2}
    assert fetched[3] == []
    open_[0].rollback()
    assert [row[3] for row in fetch(open_[3])] == [row[3] for row in fetched[0]]


def test_partitions_take_turns(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    partitions = []
    for _ in range(6):
        claim, epoch, partition, *_ = fetch(session, "'orders', 'mailer', 1")[0]
        call(session, "commit", claim, epoch)
        partitions.append(partition)
    assert partitions == [0, 1, 2] * 2


def test_a_partition_that_is_leased_or_paused_while_a_fetch_passes_events_of_another_is_left_alone(
    topic: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    nothing = EventFilter(keys=frozenset({"nothing"}))
    topic.registry.register_consumer(Consumer("orders", "picky", partitioned=True), filter=nothing)
    fill(topic, 30)
    fetcher, gate = sessions(), sessions()
    gate.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$; "
        "CREATE TRIGGER wait AFTER INSERT ON eventsql.consumer_claim EXECUTE FUNCTION wait()"
    )
    gate.commit()
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    with ThreadPoolExecutor(1) as executor:
        # It has found three partitions with events, and has taken the first.
        fetching = executor.submit(fetch, fetcher, "'orders', 'picky'")
        until_blocked()
        session.execute(
            "UPDATE eventsql.consumer SET eql_lease_owner = 'me', eql_lease_expires_at = now() + interval '1 hour' "
            "WHERE eql_name = 'picky' AND eql_partition = 1"
        )
        session.execute("UPDATE eventsql.consumer SET eql_paused = true WHERE eql_name = 'picky' AND eql_partition = 2")
        gate.rollback()
        assert fetching.result() == []
    fetcher.commit()
    assert [offset > 0 for offset in offsets(topic, "picky").values()] == [True, False, False]


@pytest.mark.both_forms
def test_an_event_that_fails_is_retried_alone_and_then_a_dead_letter_as_the_librarys(
    topic: EventSQL, session: Connection
) -> None:
    topic.registry.register_consumer(Consumer("orders", "whole"), max_attempts=2)
    topic.registry.register_consumer(Consumer("orders", "python"), max_attempts=2)
    fill(topic, 2)
    odd = {"n": "2", "dlt_consumer": "of its publisher"}
    topic.publisher.publish(Publication("orders", b"2", key="2", metadata=odd))
    fill(topic, 4)
    rows, no_snow = fetch(session, "'orders', 'whole'"), "no ☃" * 600
    failure = f"OutOfSnowError: {no_snow}"[:2_000]
    assert call(session, "fail", *rows[0][:2], rows[2][3], no_snow, "OutOfSnowError") == "retry"
    assert offsets(topic, "whole") == {-1: rows[1][3]}
    assert fetch(session, "'orders', 'whole'") == []
    (state,) = topic.registry.consumer("orders", "whole")
    assert (state.failed_event_id, state.attempts, state.failure) == (rows[2][3], 1, failure)

    let_be_due(session)
    (alone,) = fetch(session, "'orders', 'whole'")
    assert alone[3] == rows[2][3]
    assert call(session, "fail", *alone[:2], alone[3], no_snow, "OutOfSnowError") == "blocked"
    let_be_due(session)
    assert fetch(session, "'orders', 'whole'") == []
    assert [lag.cause for lag in topic.lag("orders") if lag.consumer == "whole"] == ["blocked"]

    topic.registry.register_topic(Topic("orders_dlt", 2))
    (alone,) = fetch(session, "'orders', 'whole'")
    assert call(session, "fail", *alone[:2], alone[3], no_snow, "OutOfSnowError") == "dead letter"
    assert [row[3] for row in fetch(session, "'orders', 'whole'")] == [row[3] for row in rows[3:]]

    class OutOfSnowError(Exception):
        pass

    def refuse(events: Sequence[Event], _: Connection) -> None:
        for event in events:
            if event.id == alone[3]:
                raise OutOfSnowError(no_snow)

    for _ in range(3):
        topic.consumers.consume_once("orders", "python", refuse)
        let_be_due(session)
    topic.transfer.run_once()
    mine, theirs = topic.dead_letters.list("orders")
    assert (mine.partition, mine.key, mine.value) == (theirs.partition, theirs.key, theirs.value)
    assert mine.metadata["dlt_consumer"] == "whole"
    assert {**mine.metadata, "dlt_consumer": "python", "dlt_attempts": "2"} == theirs.metadata
    assert list(mine.metadata) == list(theirs.metadata)
    (state,) = topic.registry.consumer("orders", "whole")
    (theirs_state,) = topic.registry.consumer("orders", "python")
    assert state.attempts == theirs_state.attempts == 0
    assert state.failure is None
    given_up = session.execute("SELECT eql_given_up FROM eventsql.consumer WHERE eql_name IN ('whole', 'python')")
    assert given_up.fetchall() == [(1,), (1,)]


def test_an_event_that_another_consumption_passed_holds_no_fetch_up_and_costs_no_other_its_attempts(
    topic: EventSQL, session: Connection
) -> None:
    topic.registry.register_consumer(Consumer("orders", "whole"), max_attempts=2)
    fill(topic, 5)
    rows = fetch(session, "'orders', 'whole'")
    assert call(session, "fail", *rows[0][:2], rows[2][3], "no") == "retry"
    let_be_due(session)
    (alone,) = fetch(session, "'orders', 'whole'")
    assert call(session, "fail", *alone[:2], alone[3], "no") == "blocked"
    # As EventSQL's Java library does, which knows nothing of attempts.
    session.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s WHERE eql_name = 'whole'", [alone[3]])
    later = fetch(session, "'orders', 'whole'")
    assert [row[3] for row in later] == [row[3] for row in rows[3:]]
    assert call(session, "fail", *later[0][:2], later[0][3], "no") == "retry"


@pytest.mark.parametrize("failures", [0, 3, 5_000])
def test_an_event_that_failed_waits_as_long_as_in_the_library(
    topic: EventSQL, session: Connection, failures: int
) -> None:
    topic.registry.register_consumer(Consumer("orders", "whole"), max_attempts=10_000)
    fill(topic, 1)
    ((claim, epoch, _, id_, *_),) = fetch(session, "'orders', 'whole'")
    session.execute("UPDATE eventsql.consumer SET eql_failed_event_id = %s, eql_attempts = %s", [id_, failures])
    before = session.execute("SELECT clock_timestamp()").fetchone()
    assert call(session, "fail", claim, epoch, id_, "no") == "retry"
    due = "SELECT eql_retry_at - make_interval(secs => %s) BETWEEN %s AND clock_timestamp() FROM eventsql.consumer"
    found = session.execute(f"{due} WHERE eql_name = 'whole'", [backoff_after(failures + 1), *(before or ())])
    assert found.fetchone() == (True,)


def test_a_dead_letter_of_a_backfill_belongs_to_it_and_its_errors_name_is_cut(
    topic: EventSQL, session: Connection
) -> None:
    window = "mailer__backfill_one_0_9"
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", window), max_attempts=1)
    fill(topic, 1)
    ((claim, epoch, _, id_, *_),) = fetch(session, f"'orders', '{window}'")
    assert call(session, "fail", claim, epoch, id_, "no", "E" * 3_000) == "dead letter"
    assert topic.claims.get(claim)[1] == "committed"
    topic.transfer.run_once()
    (letter,) = topic.dead_letters.list("orders", LetterFilter(backfill="one"))
    assert letter.metadata["dlt_exception"] == "E" * 2_000


def test_an_event_whose_dead_letter_topic_is_deleted_at_that_moment_is_blocked(
    topic: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", "whole"), max_attempts=1)
    fill(topic, 1)
    ((claim, epoch, _, id_, *_),) = fetch(session, "'orders', 'whole'")
    deleting = sessions()
    deleting.execute("LOCK TABLE eventsql.event_buffer IN SHARE ROW EXCLUSIVE MODE")
    deleting.execute("DELETE FROM eventsql.topic WHERE eql_name = 'orders_dlt'")
    with ThreadPoolExecutor(1) as executor:
        failing = executor.submit(call, session, "fail", claim, epoch, id_, "no")
        until_blocked()
        deleting.commit()
        assert failing.result() == "blocked"
    assert offsets(topic, "whole") == {-1: 0}


def test_a_failure_and_a_dead_letter_of_an_erased_event_say_nothing_of_it(topic: EventSQL, session: Connection) -> None:
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", "whole"), max_attempts=2)
    topic.publisher.publish(Publication("orders", b"secret", key="k"))
    topic.transfer.run_once()
    ((claim, epoch, _, id_, *_),) = fetch(session, "'orders', 'whole'")
    topic.eraser.execute("orders", ["k"])
    assert call(session, "fail", claim, epoch, id_, "secret is no number") == "retry"
    (state,) = topic.registry.consumer("orders", "whole")
    assert "secret" not in str(state.failure)
    let_be_due(session)
    ((claim, epoch, *_),) = fetch(session, "'orders', 'whole'")
    assert call(session, "fail", claim, epoch, id_, "secret is no number") == "dead letter"
    topic.transfer.run_once()
    (letter,) = topic.dead_letters.list("orders")
    assert letter.erased
    assert "secret" not in str(dict(letter.metadata))


def test_an_erasure_waits_for_a_failure_that_copies_the_event(
    topic: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", "whole"), max_attempts=1)
    topic.publisher.publish(Publication("orders", b"secret", key="k"))
    topic.transfer.run_once()
    ((claim, epoch, _, id_, *_),) = fetch(session, "'orders', 'whole'")
    failing = sessions()
    assert call(failing, "fail", claim, epoch, id_, "secret is no number") == "dead letter"
    with ThreadPoolExecutor(1) as executor:
        erasing_ = executor.submit(topic.eraser.execute, "orders", ["k"])
        until_blocked()
        failing.commit()
        assert erasing_.result().dead_letters == 1
    topic.transfer.run_once()
    (letter,) = topic.dead_letters.list("orders")
    assert letter.erased


def test_a_transaction_that_may_still_see_an_erased_event_records_no_failure(
    topic: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", "whole"), max_attempts=1)
    topic.publisher.publish(Publication("orders", b"secret", key="k"))
    topic.transfer.run_once()
    ((claim, epoch, _, id_, *_),) = fetch(session, "'orders', 'whole'")
    with session.transaction():
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session.execute("SELECT FROM eventsql.topic")
        topic.eraser.execute("orders", ["k"])
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState), session.transaction():
            call(session, "fail", claim, epoch, id_, "secret is no number")
    assert call(session, "fail", claim, epoch, id_, "secret is no number") == "dead letter"


@pytest.mark.both_forms
def test_a_filter_takes_what_it_takes_in_the_library(topic: EventSQL, session: Connection) -> None:
    filters = [
        EventFilter(keys=frozenset({"1", "3"})), EventFilter(key_prefix="5"), EventFilter(metadata={"n": "40"}),
        EventFilter(keys=frozenset({"0", "1"}), metadata={"n": "7"}), EventFilter(metadata={"path": r"c:\u0000"}),
    ]  # fmt: skip
    fill(topic, 70)
    topic.publisher.publish(Publication("orders", b"without a key", metadata={"path": r"c:\u0000"}))
    topic.transfer.run_once()
    for number, chosen in enumerate(filters):
        topic.registry.register_consumer(Consumer("orders", f"picky{number}"), filter=chosen)
        found = []
        while rows := fetch(session, f"'orders', 'picky{number}', 10"):
            found += [row[3] for row in rows]
            call(session, "commit", *rows[0][:2])
        assert found == [event.id for event in topic.reader.read("orders") if chosen.matches(event)]
        assert offsets(topic, f"picky{number}") == {-1: topic.reader.end("orders")}


def test_a_filter_that_this_version_does_not_know_lets_nothing_pass(topic: EventSQL, session: Connection) -> None:
    fill(topic, 10)
    session.execute("""UPDATE eventsql.consumer SET eql_filter = '{"sql": "true"}'""")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        fetch(session)


@pytest.mark.both_forms
@pytest.mark.parametrize(
    ("metadata", "n"),
    [
        (r'{"n": "\ud800"}', "\N{REPLACEMENT CHARACTER}"), (r'{"n": "1", "z": "\u0000"}', "1"), ('{"n": null}', "null"),
        ("[1]", None), ("null", None),
    ],
)  # fmt: skip
def test_metadata_that_another_program_wrote_hold_up_no_consumer(
    topic: EventSQL, session: Connection, metadata: str, n: str | None
) -> None:
    topic.registry.register_topic(Topic("orders_dlt")).register_consumer(Consumer("orders", "whole"), max_attempts=1)
    topic.registry.register_consumer(Consumer("orders", "picky"), filter=EventFilter(metadata={"n": "0"}))
    session.execute(
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
        "VALUES ('orders', 0, 'odd', %s::json)",
        [metadata],
    )
    fill(topic, 1)
    assert [row[5] for row in fetch(session, "'orders', 'picky'")] == [b"0"]
    claim, epoch, _, odd, *_ = fetch(session, "'orders', 'whole'")[0]
    assert call(session, "fail", claim, epoch, odd, "no") == "dead letter"
    topic.transfer.run_once()
    assert [(each.value, each.metadata.get("n")) for each in topic.dead_letters.list("orders")] == [(b"odd", n)]


@pytest.mark.both_forms
def test_one_fetch_passes_over_all_events_before_the_first_that_a_filter_takes(
    topic: EventSQL, session: Connection
) -> None:
    fill(topic, 2_000)
    topic.publisher.publish_all([Publication("orders", b"x", key="rare") for _ in range(3)])
    topic.transfer.run_once()
    fill(topic, 10)
    topic.registry.register_consumer(
        Consumer("orders", "picky", partitioned=False), filter=EventFilter(keys=frozenset({"rare"}))
    )

    claim, epoch, _, first, *_ = fetch(session, "'orders', 'picky', 1")[0]
    assert first == 2_001
    assert call(session, "fail", claim, epoch, first, "no") == "retry"
    let_be_due(session)
    rows = fetch(session, "'orders', 'picky', 2")
    assert [row[3] for row in rows] == [2_001]
    call(session, "commit", *rows[0][:2])
    rows = fetch(session, "'orders', 'picky', 2")
    assert [row[3] for row in rows] == [2_002, 2_003]
    call(session, "commit", *rows[0][:2])
    assert fetch(session, "'orders', 'picky', 2") == []

    (state,) = topic.registry.consumer("orders", "picky")
    assert (state.last_event_id, state.consumed_events) == (topic.reader.end("orders"), 2_013)
    claims = session.execute("SELECT sum(eql_events) FROM eventsql.consumer_claim WHERE eql_state = 'committed'")
    assert claims.fetchone() == (2_013,)


@pytest.mark.both_forms
def test_a_repartitioned_topic_is_fetched_layout_by_layout(
    topic: EventSQL, session: Connection, sessions: Sessions
) -> None:
    fill(topic, 21)
    topic.repartitioner.repartition("orders", 5)
    fill(topic, 21)
    fetched: list[Any] = []
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_partition = 4 FOR UPDATE")
    session.execute("SET lock_timeout TO '5s'")
    for events in (21, 42):
        while rows := fetch(session):
            fetched += rows
            call(session, "commit", *rows[0][:2])
        # While another transaction has one of its partitions, the consumer stays in its layout.
        assert len(fetched) == events
        holder.rollback()
    for key in map(str, range(7)):
        ids = [row[3] for row in fetched if row[4] == key]
        assert ids == sorted(ids)
        assert len(ids) == 6
    assert len(offsets(topic)) == 5


@pytest.mark.both_forms
def test_the_last_event_of_a_layout_keeps_the_consumer_there_while_it_waits_for_a_retry(
    topic: EventSQL, session: Connection
) -> None:
    fill(topic, 21)
    changed = topic.repartitioner.repartition("orders", 5)
    assert changed is not None
    fill(topic, 21)
    while rows := fetch(session):
        if rows[-1][3] == changed.after:
            call(session, "fail", *rows[0][:2], changed.after, "not yet")
        else:
            call(session, "commit", *rows[0][:2])
    let_be_due(session)
    assert [row[3] for row in fetch(session)] == [changed.after]


def test_a_paused_consumer_and_one_consumed_as_a_queue_give_nothing(topic: EventSQL, session: Connection) -> None:
    fill(topic, 10)
    topic.registry.pause("orders", "mailer")
    assert fetch(session) == []
    topic.registry.resume("orders", "mailer")
    session.execute(
        "UPDATE eventsql.consumer SET eql_lease_owner = 'queue', eql_lease_expires_at = now() + interval '100 years'"
    )
    assert fetch(session) == []


def test_claims_that_ended_long_ago_are_deleted(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    for _ in range(4):
        call(session, "release", *fetch(session, "'orders', 'mailer', 1, 60, 'till'")[0][:2])
    session.execute(
        "UPDATE eventsql.consumer_claim SET eql_finished_at = now() - interval '2 hours' "
        "WHERE eql_id < (SELECT max(eql_id) FROM eventsql.consumer_claim)"
    )
    session.execute(
        "UPDATE eventsql.consumer_claim SET eql_owner = 'run 7' "
        "WHERE eql_id = (SELECT min(eql_id) FROM eventsql.consumer_claim)"
    )
    session.execute("ALTER TABLE eventsql.consumer_claim ALTER COLUMN eql_id RESTART WITH 514")
    fetch(session, "'orders', 'mailer', 1")
    left = "SELECT eql_owner FROM eventsql.consumer_claim WHERE eql_state = 'released' ORDER BY eql_id"
    assert session.execute(left).fetchall() == [("run 7",), ("process till",)]


@pytest.mark.both_forms
def test_a_session_that_planned_on_an_empty_log_reads_little_of_a_full_one(
    topic: EventSQL, session: Connection
) -> None:
    for _ in range(12):
        fill(topic, 3)
        while rows := fetch(session):
            call(session, "commit", *rows[0][:2])
    fill(topic, 20_000)
    session.execute("VACUUM ANALYZE eventsql.consumer_claim")
    with session.transaction():
        rows = fetch(session, "'orders', 'mailer', 10")
        assert len(rows) == 10
        call(session, "commit", *rows[0][:2])
        scanned = session.execute(
            "SELECT relname, seq_tup_read, coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables "
            "WHERE relname = ANY (%s)",
            [[stored("orders"), "consumer_claim"]],
        ).fetchall()
    assert len(scanned) == 2
    for table, read, fetched in scanned:
        assert (read, fetched < 100) == (0, True), table


def test_a_log_that_was_compacted_is_consumed_to_its_end(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "WINDOW_IDS", 30)
    platform.registry.register_topic(Topic("orders", 3, storage=BLOCKS))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    for number in range(100):
        platform.publisher.publish(Publication("orders", b"x", key=str(number % 7)))
        platform.transfer.run_once()
    platform.compactor.execute("orders")
    gaps = session.execute("SELECT count(*) FROM eventsql.orders_block WHERE eql_span IS NOT NULL").fetchone()
    assert gaps is not None
    assert gaps[0] > 0

    fetched = []
    while rows := fetch(session, "'orders', 'mailer', 7"):
        call(session, "commit", *rows[0][:2])
        fetched += [row[3] for row in rows]
    assert sorted(fetched) == [event.id for event in platform.reader.read("orders")]
    assert sum(state.consumed_events for state in platform.registry.consumer("orders", "mailer")) == 100


def test_the_events_before_a_failing_one_are_committed_though_compaction_merges_them_at_that_moment(
    platform: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(compacting, "WINDOW_IDS", 30)
    platform.registry.register_topic(Topic("orders", 3, storage=BLOCKS))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    for number in range(60):
        platform.publisher.publish(Publication("orders", b"x", key=str(number % 7)))
        platform.transfer.run_once()
    rows = fetch(session)
    assert len(rows) > 5

    # The count of the events before the failing one stops after its first statement.
    gate = sessions()
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    row = session.execute("SELECT pg_get_functiondef('eventsql.partition_waiting'::regproc)").fetchone()
    assert row is not None
    before, statement, after = row[0].partition("USING after")
    ending, rest = after.split(";", 1)
    session.execute(f"{before}{statement}{ending}; PERFORM pg_advisory_xact_lock_shared(1);{rest}")
    failing = threading.Thread(target=lambda: call(session, "fail", *rows[0][:2], rows[5][3], "no"))
    failing.start()
    until_blocked()
    assert platform.compactor.execute("orders").into
    gate.rollback()
    failing.join()
    assert offsets(platform)[rows[0][2]] == rows[4][3]


@pytest.mark.parametrize("changes", [[ROWS], [ROWS, BLOCKS]])
def test_a_fetch_reads_little_of_a_log_in_both_forms(
    platform: EventSQL, session: Connection, changes: list[Storage]
) -> None:
    platform.registry.register_topic(Topic("orders", 3, storage=BLOCKS))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    for _ in range(20):
        fill(platform, 1_000)
    for storage in changes:
        platform.registry.set_storage("orders", storage)
        fill(platform, 1_000)
    with session.transaction():
        rows = fetch(session, "'orders', 'mailer', 10")
        assert len(rows) == 10
        call(session, "commit", *rows[0][:2])
        read = session.execute(
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables "
            "WHERE relname ~ '^orders_.*_segment_'"
        ).fetchone()
    assert read is not None
    assert 0 < read[0] < 100


REFUSED = [
    "fetch('absent', 'mailer')", "fetch('orders', 'absent')", "fetch(NULL, 'mailer')",
    "fetch('orders', 'mailer', 0)",
    "fetch('orders', 'mailer', 10001)", "fetch('orders', 'mailer', NULL)", "fetch('orders', 'mailer', 1, 0)",
    "fetch('orders', 'mailer', 1, 'NaN')", "renew(1, 1, 0)",
    "commit({claim}, {epoch}, {after})", "commit({claim}, {epoch}, {beyond})",
    "fail({claim}, {epoch}, {beyond}, 'x')",
    "fail({claim}, {epoch}, {after}, 'x')", "fail({claim}, {epoch}, NULL, 'x')",
    "fail({claim}, {epoch}, (-9223372036854775808)::bigint, 'x')",
]  # fmt: skip


def test_wrong_arguments_are_refused(topic: EventSQL, session: Connection) -> None:
    fill(topic, 30)
    for partition in range(3):
        topic.consumers.consume_once("orders", "mailer", lambda *_: None, max_events=1, partition=partition)
    claim, epoch, partition, *_ = fetch(session, "'orders', 'mailer', 1")[0]
    after, _, beyond, *_ = ids_in(topic, "orders", partition)
    known = {"claim": claim, "epoch": epoch, "after": after, "beyond": beyond}
    for statement in REFUSED:
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            session.execute(f"SELECT eventsql.{statement.format(**known)}".encode())
            pytest.fail(statement)
    for unknown in ("commit(NULL, 1)", "release(0, 1)", "renew(0, 1)", "fail(0, 1, 1, 'x')"):
        with pytest.raises(psycopg.errors.NoDataFound):
            session.execute(f"SELECT eventsql.{unknown}".encode())


@pytest.mark.parametrize("storage", ["rows", "blocks"])
def test_the_consumer_of_one_topic_fetches_in_a_hostile_session(
    platform: EventSQL, direct_dsn: str, storage: Storage
) -> None:
    for name in ("orders", "payments"):
        platform.registry.register_topic(Topic(name, 2, storage=storage)).register_topic(Topic(f"{name}_dlt"))
        platform.registry.register_consumer(Consumer(name, "mailer", partitioned=True), max_attempts=1)
    roles = Roles(platform.database)
    roles.create(prefix="fetching", topics=["orders"])
    try:
        fill(platform, 10)
        fill(platform, 10, "payments")
        with psycopg.connect(direct_dsn, autocommit=True) as service:
            service.execute("CREATE TEMP TABLE consumer (eql_name text); CREATE TEMP TABLE topic (eql_name text)")
            service.execute("SET ROLE fetching_consumer_orders")
            rows = fetch(service)
            assert call(service, "fail", *rows[0][:2], rows[0][3], "no") == "dead letter"
            rows = fetch(service)
            call(service, "renew", *rows[0][:2])
            call(service, "commit", *rows[0][:2])
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                fetch(service, "'payments', 'mailer'")
            service.execute("SET ROLE fetching_reader")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                fetch(service, "'payments', 'mailer'")
    finally:
        roles.drop()


# Other programs


def test_psql_consumes(topic: EventSQL, psql: Psql) -> None:
    fill(topic, 30)
    said = psql("""
        SELECT max(claim) AS claim, max(epoch) AS epoch, count(*) AS events
        FROM eventsql.fetch('orders', 'mailer') \\gset
        BEGIN;
        INSERT INTO effects (event_id) VALUES (:events);
        SELECT eventsql.commit(:claim, :epoch);
        COMMIT;
        SELECT :events > 1;
    """)
    assert said.split() == ["t"]
    assert sum(offset > 0 for offset in offsets(topic).values()) == 1


def test_javas_driver_consumes(topic: EventSQL, jdbc: Any) -> None:
    fill(topic, 60)
    fetch_ = jdbc.prepareStatement("SELECT * FROM eventsql.fetch('orders', 'mailer', 7)")
    effect = jdbc.prepareStatement("INSERT INTO effects (event_id) VALUES (?)")
    commit = jdbc.prepareStatement("SELECT eventsql.commit(?, ?)")
    while True:
        events = fetch_.executeQuery()
        ids, held = [], (0, 0)
        while events.next():
            ids.append(events.getLong("id"))
            held = events.getLong("claim"), events.getLong("epoch")
        jdbc.commit()
        if not ids:
            break
        for id_ in ids:
            effect.setLong(1, id_)
            effect.execute()
        for place, number in enumerate(held, 1):
            commit.setLong(place, number)
        commit.execute()
        jdbc.commit()
    assert sorted(effects(topic)) == [event.id for event in topic.reader.read("orders")]
