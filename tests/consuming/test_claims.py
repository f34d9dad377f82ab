"""A claim is an exact range for one owner. An owner that lost it commits nothing; a dead one holds nothing up."""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from eventsql_orchestration import (
    NOT_PARTITIONED,
    Consumer,
    Event,
    EventFilter,
    EventSQL,
    OffsetRange,
    Publication,
    Topic,
)
from eventsql_orchestration.consuming import claim_processing
from eventsql_orchestration.consuming import claims as claims_module
from eventsql_orchestration.consuming.claim_making import ClaimMaker
from eventsql_orchestration.consuming.claim_processing import finish_claim
from eventsql_orchestration.consuming.claims import Claim, Claims, NoClaim
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import (
    ClaimLostError,
    ClaimNotFoundError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    DatabaseUnavailableError,
    ValidationError,
)
from tests.conftest import Administrator
from tests.effects import effects, make_table, write
from tests.forms import change_time, drop_events, ids_in, reading, stored
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import SaidBy, Sessions, Spawn, Terminate, Until, UntilBlocked


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "fares", partitioned=True), max_attempts=2)
    platform.registry.register_consumer(Consumer("orders", "whole"), max_attempts=2)
    make_table(platform)


pytestmark = pytest.mark.prepared.with_args(prepare)


def fill(platform: EventSQL, count: int) -> list[int]:
    """Publish and transfer events of both partitions in turn; gives their offsets."""
    before = platform.reader.end("orders")
    platform.publisher.publish_all(Publication("orders", b"%d" % n, partition=n % 2) for n in range(count))
    platform.transfer.run_once()
    return [event.id for event in platform.reader.read("orders", after=before)]


def claim(platform: EventSQL, consumer: str = "whole", partition: int = NOT_PARTITIONED, **options: Any) -> Claim:
    claimed = platform.claims.claim("orders", consumer, partition, **{"owner": "me", **options})
    assert isinstance(claimed, Claim), claimed
    return claimed


def refusal(platform: EventSQL, consumer: str = "whole", partition: int = NOT_PARTITIONED, **options: Any) -> str:
    refused = platform.claims.claim("orders", consumer, partition, **{"owner": "me", **options})
    assert isinstance(refused, NoClaim), refused
    return refused.reason


def offset(platform: EventSQL, consumer: str = "whole", partition: int = NOT_PARTITIONED) -> int:
    (state,) = [s for s in platform.registry.consumer("orders", consumer) if s.partition == partition]
    return state.last_event_id


def let_expire(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s'")


def as_java(platform: EventSQL, consumer: str, upto: int, partition: int = NOT_PARTITIONED) -> None:
    """Consume up to an offset as EventSQL's Java library does, which knows nothing of leases."""
    with platform.database.transaction() as connection:
        row = connection.execute(
            "SELECT eql_consumed_events FROM eventsql.consumer WHERE eql_topic = 'orders' AND eql_name = %s "
            "AND eql_partition = %s FOR UPDATE SKIP LOCKED",
            (consumer, partition),
        ).fetchone()
        assert row is not None
        connection.execute(
            "UPDATE eventsql.consumer SET eql_first_event_id = NULL, eql_last_event_id = %s, "
            "eql_last_consumption_at = now(), eql_consumed_events = %s "
            "WHERE eql_topic = 'orders' AND eql_name = %s AND eql_partition = %s",
            (upto, row[0] + 1, consumer, partition),
        )


# Claiming


def test_a_claim_is_the_range_of_what_waits(platform: EventSQL) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform)
    assert claimed.range == claimed.remaining == OffsetRange("orders", NOT_PARTITIONED, 0, ids[-1])
    assert (claimed.consumer, claimed.events, claimed.owner, claimed.position) == ("whole", 10, "me", 0)
    assert platform.claims.get(claimed.id) == (claimed, "claimed")
    assert platform.claims.live("orders", "whole") == claimed


def test_a_claim_of_a_partition_counts_its_events_alone(platform: EventSQL) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform, "fares", 1)
    assert claimed.range == OffsetRange("orders", 1, 0, ids[-1])
    assert claimed.events == 5
    assert platform.claims.live("orders", "fares", 0) is None


def test_events_that_come_after_a_claim_do_not_change_it(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    fill(platform, 4)
    taken = platform.claims.adopt(claimed.id, owner="run")
    assert platform.claims.process(taken, write).consumed == 4
    assert effects(platform) == ids
    assert offset(platform) == ids[-1]


# Refusals


def test_nothing_is_claimed_where_nothing_waits(platform: EventSQL) -> None:
    assert refusal(platform) == "no events wait after offset 0"
    fill(platform, 2)
    platform.consumers.consume_once("orders", "whole", lambda _events, _connection: None)
    assert refusal(platform) == "no events wait after offset 2"


def test_too_few_events_wait_until_the_oldest_has_waited_long_enough(platform: EventSQL) -> None:
    fill(platform, 2)
    assert refusal(platform, min_events=3, max_wait=3_600.0).startswith("2 of 3 events wait, for ")
    claimed = claim(platform, min_events=2, max_wait=3_600.0)
    assert claimed.events == 2
    platform.claims.release(claimed)
    with platform.database.connection() as connection:
        connection.execute(
            f"UPDATE eventsql.{stored('orders')} SET eql_created_at = now() - interval '1 hour' "
            "WHERE eql_id = 1".encode()
        )
    assert claim(platform, min_events=3, max_wait=3_600.0).events == 2


def test_too_few_events_are_claimed_once_their_layout_has_an_end(platform: EventSQL) -> None:
    fill(platform, 4)
    assert refusal(platform, "fares", 1, min_events=3, max_wait=3_600.0).startswith("2 of 3 events wait, for ")
    platform.repartitioner.repartition("orders", 3)
    assert claim(platform, "fares", 1, min_events=3, max_wait=3_600.0).events == 2


def test_events_from_before_the_clock_went_back_do_not_wait_until_it_is_there_again(platform: EventSQL) -> None:
    fill(platform, 2)
    with platform.database.connection() as connection:
        for event in (1, 2):
            change_time(connection, "orders", event, datetime.now(UTC) + timedelta(hours=2))
    assert claim(platform, min_events=3, max_wait=3_600.0).events == 2


def test_a_partition_that_is_leased_is_not_claimed_and_its_owner_is_named(platform: EventSQL) -> None:
    fill(platform, 2)
    claim(platform, owner="run 7", lease=60.0)
    reason = refusal(platform, owner="another")
    assert reason.startswith("run 7 leases the partition for ")
    assert refusal(platform, owner="run 7") == reason


def test_in_process_consumption_leaves_a_leased_partition_alone(platform: EventSQL) -> None:
    fill(platform, 2)
    claim(platform)
    assert platform.consumers.consume_once("orders", "whole", write) == 0


def test_a_paused_consumer_is_not_claimed(platform: EventSQL) -> None:
    fill(platform, 2)
    platform.registry.pause("orders", "whole")
    assert "`eventsql consumer resume orders whole`" in refusal(platform)
    platform.registry.resume("orders", "whole")
    assert claim(platform).events == 2


def test_a_partition_that_waits_for_a_retry_or_is_blocked_says_which_event(platform: EventSQL) -> None:
    fill(platform, 2)

    def fail(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("no such customer")

    processed = platform.claims.process(claim(platform), fail)
    assert processed.failure is not None
    assert (processed.consumed, processed.failure.outcome) == (0, Failure.RETRY)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() + interval '1 hour'")
    reason = refusal(platform)
    assert reason.startswith("event 1 is retried in 3")
    assert reason.endswith(" s (ValueError: no such customer)")
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now()")
    again = claim(platform)
    assert again.events == 2, "it does not ask for the failed event alone"
    processed = platform.claims.process(again, fail)
    assert processed.failure is not None
    assert processed.failure.outcome == Failure.BLOCKED
    assert "event 1 blocks the partition: it failed 2 times" in refusal(platform)
    assert "orders_dlt" in refusal(platform)
    platform.registry.resume("orders", "whole")
    assert claim(platform).events == 2


def test_nothing_is_claimed_instead_of_a_claim_that_has_ended(platform: EventSQL) -> None:
    """Its owner may be about to claim the next events."""
    fill(platform, 4)
    live = claim(platform, max_events=2)
    let_expire(platform)
    anew = claim(platform, max_events=2, instead_of=live)
    assert platform.claims.get(live.id)[1] == "released"
    platform.claims.process(anew, write)
    assert refusal(platform, instead_of=anew) == f"{anew} has just ended"
    assert claim(platform).events == 2


def test_a_consumer_that_does_not_exist_is_an_error(platform: EventSQL) -> None:
    with pytest.raises(ConsumerNotFoundError, match="nobody"):
        platform.claims.claim("orders", "nobody", owner="me")
    with pytest.raises(ConsumerNotFoundError):
        platform.claims.claim("orders", "fares", 2, owner="me")


@pytest.mark.parametrize(
    "options",
    [{"min_events": 0}, {"min_events": 3, "max_events": 2}, {"lease": 0.0}, {"timeout": 0.0}, {"max_wait": -1.0}],
    ids=str,
)
def test_an_impossible_claim_is_refused(platform: EventSQL, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        platform.claims.claim("orders", "whole", owner="me", **options)


def test_claiming_does_not_wait_longer_than_its_timeout(platform: EventSQL, sessions: Sessions) -> None:
    fill(platform, 2)
    migration = sessions()
    migration.execute("LOCK TABLE eventsql.orders_event")
    with pytest.raises(DatabaseBusyError, match=r"each statement of a claim may last 0\.05 s"):
        platform.claims.claim("orders", "whole", owner="me", timeout=0.05)
    migration.rollback()
    assert claim(platform).events == 2


def test_a_claim_whose_process_stood_still_may_be_tried_again(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(platform, 2)

    def stand_still(_maker: ClaimMaker, connection: Connection, *_: object) -> None:
        assert select.select([connection], [], [], PATIENCE)[0]

    with monkeypatch.context() as patched:
        patched.setattr(ClaimMaker, "_refusal", stand_still)
        with pytest.raises(DatabaseBusyError):
            platform.claims.claim("orders", "whole", owner="me", timeout=0.05)
    assert claim(platform).events == 2


def test_a_claim_whose_connection_is_lost_is_not_said_to_have_taken_too_long(
    platform: EventSQL, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(platform, 2)
    monkeypatch.setattr(ClaimMaker, "_refusal", lambda _maker, connection, *_: terminate(connection))
    with pytest.raises(DatabaseUnavailableError):
        platform.claims.claim("orders", "whole", owner="me")


def test_if_many_claim_at_once_one_gets_the_partition(platform: EventSQL) -> None:
    fill(platform, 10)
    gate = threading.Barrier(6)

    def try_to_claim(owner: int) -> Claim | NoClaim:
        gate.wait()
        return platform.claims.claim("orders", "whole", owner=f"owner {owner}")

    with ThreadPoolExecutor(6) as executor:
        results = [future.result() for future in [executor.submit(try_to_claim, owner) for owner in range(6)]]
    assert len([result for result in results if isinstance(result, Claim)]) == 1


# Processing


def test_a_claim_is_processed_in_batches_and_committed_once(platform: EventSQL) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform)
    batches: list[int] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        batches.append(len(events))
        write(events, connection)

    assert platform.claims.process(claimed, handle, batch=4).consumed == 10
    assert batches == [4, 4, 2]
    assert effects(platform) == ids
    assert platform.claims.get(claimed.id)[1] == "committed"
    (state,) = platform.registry.consumer("orders", "whole")
    assert (state.last_event_id, state.consumed_events, state.lease_owner) == (ids[-1], 10, None)


@pytest.mark.parametrize("batch", [1, 3, 5, 6])
def test_a_partition_is_processed_up_to_the_end_of_its_range_whatever_the_batch(platform: EventSQL, batch: int) -> None:
    fill(platform, 10)
    claimed = claim(platform, "fares", 0)
    assert platform.claims.process(claimed, write, batch=batch).consumed == 5
    ids = ids_in(platform, "orders", 0)
    assert effects(platform) == ids
    assert offset(platform, "fares", 0) == claimed.range.upto == ids[-1]


def test_each_batch_of_a_claim_renews_its_lease(platform: EventSQL) -> None:
    fill(platform, 3)
    leased: list[bool] = []

    def handle(_events: Sequence[Event], connection: Connection) -> None:
        found = connection.execute("SELECT bool_or(eql_lease_expires_at > now()) FROM eventsql.consumer").fetchone()
        assert found is not None
        leased.append(found[0])
        # The lease ends while the batch is handled.
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s'")

    platform.claims.process(claim(platform), handle, batch=1)
    assert leased == [True, True, True]


def test_a_batch_of_zero_events_is_refused(platform: EventSQL) -> None:
    fill(platform, 2)
    with pytest.raises(ValidationError):
        platform.claims.process(claim(platform), write, batch=0)


def test_the_rest_of_a_claim_is_released_after_too_many_dead_letters(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_max_attempts = 1")
    ids = fill(platform, 5)

    def fail(_events: Sequence[Event], _connection: Connection) -> None:
        raise ValueError("no")

    claimed = claim(platform)
    result = platform.claims.process(claimed, fail, max_dead_letters=2)
    assert [letter.event_id for letter in result.dead_letters] == ids[:2]
    assert (result.consumed, offset(platform)) == (2, ids[1])
    assert platform.claims.get(claimed.id)[1] == "released"


def test_a_range_that_fails_as_a_whole_is_noted_on_its_first_event_and_given_back(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    failure = platform.claims.fail(claimed, ValueError("the job died"))
    assert failure is not None
    assert (failure.event_id, failure.attempts, failure.outcome) == (ids[0], 1, Failure.RETRY)
    assert platform.claims.get(claimed.id)[1] == "released"
    with pytest.raises(ClaimLostError):
        platform.claims.fail(claimed, ValueError("again"))


def test_a_range_whose_events_are_gone_fails_without_a_failure(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with platform.database.connection() as connection:
        drop_events(connection, "orders", claimed.range.upto)
    assert platform.claims.fail(claimed, ValueError("no")) is None
    assert platform.claims.get(claimed.id)[1] == "released"


def test_a_range_that_is_blocked_asks_for_no_topic_of_dead_letters(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_max_attempts = 1")
    fill(platform, 1)
    failure = platform.claims.fail(claim(platform), ValueError("the job died"))
    assert failure is not None
    assert failure.outcome == Failure.BLOCKED
    (blocked,) = [message for message in caplog.messages if "is blocked by event" in message]
    assert blocked.endswith("(ValueError: the job died); correct the handler and resume the consumer")


# Committing in a transaction of one's own


def test_effects_and_offset_commit_together(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    with platform.database.transaction() as connection:
        platform.claims.check(connection, claimed)
        write(platform.reader.read("orders"), connection)
        platform.claims.commit(connection, claimed)
        assert (offset(platform), effects(platform)) == (0, [])
    assert (offset(platform), effects(platform)) == (ids[-1], ids)
    assert platform.claims.get(claimed.id)[1] == "committed"
    (state,) = platform.registry.consumer("orders", "whole")
    assert (state.consumed_events, state.lease_owner, state.lease_expires_at) == (4, None, None)
    with pytest.raises(ClaimLostError), platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)


def test_a_commit_that_is_rolled_back_leaves_the_claim_as_it_was(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with pytest.raises(ZeroDivisionError), platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)
        raise ZeroDivisionError
    assert platform.claims.get(claimed.id) == (claimed, "claimed")
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)


def test_a_commit_outside_of_a_transaction_is_refused(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with platform.database.connection() as connection:
        for use in (platform.claims.check, platform.claims.commit):
            with pytest.raises(ValidationError, match="transaction"):
                use(connection, claimed)
    assert offset(platform) == 0


@pytest.mark.parametrize("cursor", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
def test_the_connection_of_a_commit_may_be_set_up_in_any_way(
    platform: EventSQL, dsn: str, cursor: type[psycopg.Cursor[Any]]
) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    mine: Any
    with psycopg.connect(dsn, cursor_factory=cursor, row_factory=dict_row) as mine:
        mine.execute("SET datestyle TO 'SQL, DMY'")
        platform.claims.check(mine, claimed)
        platform.claims.commit(mine, claimed)
    assert offset(platform) == claimed.range.upto


def test_a_claim_is_committed_in_a_transaction_of_sqlalchemy(platform: EventSQL, engine: sqlalchemy.Engine) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with engine.begin() as mine:
        platform.claims.check(mine, claimed)
        platform.claims.commit(mine, claimed)
    assert offset(platform) == claimed.range.upto


def test_a_commit_in_another_database_is_refused(platform: EventSQL, administrator: Administrator) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with administrator.copied("elsewhere") as dsn, psycopg.connect(dsn) as mine:
        for use in (platform.claims.check, platform.claims.commit):
            with pytest.raises(ValidationError, match="'elsewhere'"):
                use(mine, claimed)
    assert platform.claims.get(claimed.id) == (claimed, "claimed")


# Owners that come and go


def dying_in(platform: EventSQL, claimed: Claim, *, batch: int) -> None:
    """Process a claim in batches of four; the process dies in the given one, after it has written its effects."""
    batches = 0

    def die(events: Sequence[Event], connection: Connection) -> None:
        nonlocal batches
        batches += 1
        write(events, connection)
        if batches == batch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        platform.claims.process(claimed, die, batch=4)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_that_is_retried_goes_on_in_the_range_of_its_claim_after_what_was_committed(
    platform: EventSQL, batch: int
) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform, max_events=6)
    first = platform.claims.adopt(claimed.id, owner="run 1")
    dying_in(platform, first, batch=batch)
    fill(platform, 5)
    again = platform.claims.adopt(claimed.id, owner="run 1, again")
    done = 4 * (batch - 1)
    assert (again.position, again.range) == ([0, *ids][done], claimed.range)
    assert platform.claims.process(again, write).consumed == 6 - done
    assert effects(platform) == ids[:6]
    assert platform.registry.consumer("orders", "whole")[0].consumed_events == 6
    assert claim(platform).range.after == ids[5]


def test_releasing_gives_back_the_rest_alone(platform: EventSQL) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform)
    dying_in(platform, claimed, batch=2)
    assert platform.claims.release(claimed)
    assert not platform.claims.release(claimed)
    assert platform.claims.live("orders", "whole") is None
    assert claim(platform).range == replace(claimed.range, after=ids[3])


def test_an_owner_whose_claim_was_adopted_does_not_release_it(platform: EventSQL) -> None:
    """The claim keeps its id."""
    fill(platform, 4)
    claimed = claim(platform)
    adopted = platform.claims.adopt(claimed.id, owner="successor")
    assert not platform.claims.release(claimed)
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, adopted)


def test_a_claim_that_was_released_commits_nothing(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    assert platform.claims.release(claimed)
    with pytest.raises(ClaimLostError):
        platform.claims.process(claimed, write)
    assert (effects(platform), offset(platform)) == ([], 0)


@pytest.mark.parametrize("gone", ["consumed", "filtered out"])
def test_an_event_that_the_consumer_does_not_get_any_more_has_not_failed(platform: EventSQL, gone: str) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    event = platform.claims.read(claimed)[1]
    if gone == "consumed":
        with platform.database.transaction() as connection:
            claimed = platform.claims.commit(connection, claimed, upto=event.id + 1)
    else:
        platform.registry.register_consumer(Consumer("orders", "whole"), filter=EventFilter(keys=frozenset({"none"})))
    with pytest.raises(ClaimLostError):
        platform.claims.settle(claimed, event, ValueError("no"))
    assert not platform.registry.consumer("orders", "whole")[0].failing


def after_its_lease(platform: EventSQL, _claimed: Claim) -> Claim:
    let_expire(platform)
    return claim(platform, owner="successor")


def by_adoption(platform: EventSQL, claimed: Claim) -> Claim:
    return platform.claims.adopt(claimed.id, owner="successor")


def by_its_own_adoption(platform: EventSQL, claimed: Claim) -> Claim:
    """As of a run that was thought dead and is started again: its owner has the same name."""
    return platform.claims.adopt(claimed.id, owner=claimed.owner)


def registered_anew(platform: EventSQL, claimed: Claim) -> Claim:
    platform.registry.unregister_consumer("orders", "whole")
    platform.registry.register_consumer(Consumer("orders", "whole"))
    anew = claim(platform, owner=claimed.owner)
    # The same owner, epoch and offset: the claim alone tells them apart.
    assert (anew.epoch, anew.position) == (claimed.epoch, claimed.position)
    return anew


@pytest.mark.parametrize("taken_over", [after_its_lease, by_adoption, by_its_own_adoption, registered_anew])
def test_an_owner_whose_claim_went_to_another_commits_nothing(
    platform: EventSQL, taken_over: Callable[[EventSQL, Claim], Claim]
) -> None:
    ids = fill(platform, 4)
    zombie = claim(platform, owner="zombie")
    successor = taken_over(platform, zombie)
    assert successor.range == zombie.range
    with pytest.raises(ClaimLostError):
        platform.claims.process(zombie, write)
    with pytest.raises(ClaimLostError), platform.database.transaction() as connection:
        write(platform.reader.read("orders"), connection)
        platform.claims.commit(connection, zombie)
    with pytest.raises(ClaimLostError), platform.database.transaction() as connection:
        platform.claims.check(connection, zombie)
    with pytest.raises(ClaimLostError):
        platform.claims.settle(zombie, platform.reader.read("orders")[0], ValueError("no"))
    with pytest.raises(ClaimLostError):
        platform.claims.renew(zombie)
    assert not platform.claims.release(zombie)
    assert f"{successor.owner} leases the partition" in refusal(platform)
    assert effects(platform) == []
    assert platform.claims.process(successor, write).consumed == 4
    assert effects(platform) == ids


def test_an_owner_that_loses_its_claim_between_batches_stops_there(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = fill(platform, 10)
    claimed = claim(platform)
    taken: list[Claim] = []

    def lose_it_after_the_first_batch(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)

    lock_claim = claim_processing.lock_claim

    def locked(connection: Connection, queries: Queries, of: Claim) -> Any:
        if of.position and not taken:
            taken.append(platform.claims.adopt(of.id, owner="successor"))
        return lock_claim(connection, queries, of)

    monkeypatch.setattr(claim_processing, "lock_claim", locked)
    with pytest.raises(ClaimLostError):
        platform.claims.process(claimed, lose_it_after_the_first_batch, batch=4)
    assert effects(platform) == ids[:4]
    platform.claims.process(taken[0], write)
    assert effects(platform) == ids


def test_a_claim_that_a_failover_has_lost_is_not_taken_for_the_claim_that_has_its_id_now(platform: EventSQL) -> None:
    fill(platform, 4)
    lost = claim(platform, owner="one")
    with platform.database.connection() as connection:
        # As on a promoted server that lacks the commit of the claim.
        connection.execute(
            "DELETE FROM eventsql.consumer_claim; "
            "UPDATE eventsql.consumer SET eql_epoch = 0, eql_lease_owner = NULL, eql_lease_expires_at = NULL; "
            "ALTER TABLE eventsql.consumer_claim ALTER COLUMN eql_id RESTART"
        )
    taken = claim(platform, owner="another")
    assert (taken.id, taken.epoch, taken.range) == (lost.id, lost.epoch, lost.range)
    with pytest.raises(ClaimLostError), platform.database.transaction() as connection:
        platform.claims.commit(connection, lost)
    with pytest.raises(ClaimLostError):
        platform.claims.renew(lost)
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, taken)


def test_a_claim_of_a_consumer_that_was_registered_again_is_not_renewed(platform: EventSQL) -> None:
    """The consumer counts its epochs from the start, and the owner is the same process."""
    fill(platform, 4)
    before = claim(platform)
    platform.registry.unregister_consumer("orders", "whole")
    platform.registry.register_consumer(Consumer("orders", "whole"))
    anew = claim(platform)
    assert (anew.epoch, anew.owner) == (before.epoch, before.owner)
    with pytest.raises(ClaimLostError):
        platform.claims.renew(before)
    platform.claims.renew(anew)


def test_a_claim_whose_lease_expired_is_its_owners_as_long_as_nobody_takes_it(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    let_expire(platform)
    assert platform.claims.live("orders", "whole") == claimed
    platform.claims.renew(claimed)
    assert "leases the partition" in refusal(platform, owner="another")
    let_expire(platform)
    assert platform.claims.process(claimed, write).consumed == 4


def test_an_expired_lease_is_claimed_anew_from_the_same_offset(platform: EventSQL) -> None:
    fill(platform, 5)
    earlier = claim(platform, max_events=1)
    platform.claims.process(earlier, write)
    dead = claim(platform)
    let_expire(platform)
    fill(platform, 2)
    anew = claim(platform, owner="another")
    assert (anew.range.after, anew.events) == (dead.range.after, 6)
    assert [platform.claims.get(each.id)[1] for each in (earlier, dead)] == ["committed", "released"]
    assert platform.claims.live("orders", "whole") == anew
    with pytest.raises(ClaimLostError, match="released before"):
        platform.claims.adopt(dead.id, owner="late")


def test_a_claim_of_an_unknown_number_is_not_found(platform: EventSQL) -> None:
    with pytest.raises(ClaimNotFoundError):
        platform.claims.adopt(4711, owner="me")


def test_a_claim_that_is_released_while_it_is_taken_over_is_not_taken_over(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    get = Claims.get

    def get_and_release(own: Claims, claim_id: int) -> tuple[Claim, str]:
        found = get(own, claim_id)
        platform.claims.release(claimed)
        return found

    monkeypatch.setattr(Claims, "get", get_and_release)
    with pytest.raises(ClaimLostError):
        platform.claims.adopt(claimed.id, owner="another")
    monkeypatch.undo()
    assert claim(platform, owner="another").events == 4


def test_a_claim_is_taken_over_from_the_owner_that_is_named_alone(platform: EventSQL) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    adopted = platform.claims.adopt(claimed.id, owner="one", previous="me")
    with pytest.raises(ClaimLostError):
        platform.claims.adopt(claimed.id, owner="two", previous="me")
    platform.claims.renew(adopted)


@pytest.mark.parametrize("previous", [None, "me"])
def test_if_two_take_a_claim_over_at_once_one_gets_it(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch,
    *, previous: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(claims_module, "LOCK_TIMEOUT", PATIENCE)
    fill(platform, 4)
    claimed = claim(platform)
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_name = 'whole' FOR UPDATE")

    def take(owner: str) -> Claim | None:
        try:
            return platform.claims.adopt(claimed.id, owner=owner, previous=previous)
        except ClaimLostError:
            return None

    with ThreadPoolExecutor(2) as executor:
        taking = [executor.submit(take, owner) for owner in ("one", "two")]
        until_blocked(2)
        holder.rollback()
        (held,) = [each for future in taking if (each := future.result()) is not None]
    platform.claims.renew(held)
    assert platform.claims.live("orders", "whole") == held


# Consumers that know nothing of leases


def test_a_claim_that_is_overtaken_before_it_begins_commits_nothing(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    as_java(platform, "whole", ids[1])
    with pytest.raises(ClaimLostError, match="moved the offset from 0 to 2"):
        platform.claims.process(claimed, write)
    assert effects(platform) == []


def test_effects_of_a_claim_that_is_overtaken_while_it_is_worked_on_are_rolled_back(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    work = platform.reader.read("orders", after=claimed.range.after, upto=claimed.range.upto)
    as_java(platform, "whole", ids[1])
    with pytest.raises(ClaimLostError), platform.database.transaction() as connection:
        write(work, connection)
        platform.claims.commit(connection, claimed)
    assert effects(platform) == []
    assert offset(platform) == ids[1]


def test_a_claim_that_is_overtaken_within_its_range_is_adopted_for_the_rest_of_it(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    as_java(platform, "whole", ids[1])
    rest = platform.claims.adopt(claimed.id, owner="again")
    assert platform.claims.process(rest, write).consumed == 2
    assert effects(platform) == ids[2:]


def test_a_claim_that_is_overtaken_as_a_whole_is_lost(platform: EventSQL) -> None:
    ids = fill(platform, 4)
    claimed = claim(platform)
    as_java(platform, "whole", ids[-1])
    with pytest.raises(ClaimLostError, match="overtaken"):
        platform.claims.adopt(claimed.id, owner="again")


def test_an_offset_that_went_back_voids_a_claim(platform: EventSQL) -> None:
    fill(platform, 4)
    platform.consumers.consume_once("orders", "whole", write, max_events=2)
    claimed = claim(platform)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = NULL")
    with pytest.raises(ClaimLostError):
        platform.claims.process(claimed, write)
    with pytest.raises(ClaimLostError):
        platform.claims.adopt(claimed.id, owner="again")


# Heartbeats


def expiry(platform: EventSQL) -> Any:
    return platform.registry.consumer("orders", "whole")[0].lease_expires_at


def has_ended(claimed: Claim) -> bool:
    """Whether no heartbeat of a claim runs."""
    return all(thread.name != f"eventsql-claim-{claimed.id}" for thread in threading.enumerate())


def test_a_heartbeat_keeps_the_claim_while_the_block_runs(platform: EventSQL, until: Until) -> None:
    fill(platform, 4)
    claimed = claim(platform, lease=60.0)
    before = expiry(platform)
    with platform.claims.heartbeat(claimed, lease=0.03) as lost:
        until(lambda: expiry(platform) != before)
        between = expiry(platform)
        until(lambda: expiry(platform) != between)
        assert not lost.is_set()
    until(lambda: has_ended(claimed))
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)


def test_a_heartbeat_whose_start_ctrl_c_interrupted_ends(platform: EventSQL, until: Until) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    for after in itertools.count():
        with ExitStack() as block:
            begin = partial(block.enter_context, platform.claims.heartbeat(claimed))
            goes_on = interrupted(after, begin, module="eventsql_orchestration/threads.py", events=["call", "return"])
        until(lambda: has_ended(claimed))
        if not goes_on:
            break
    assert after > 1


@pytest.mark.parametrize("by", ["its release", "another owner", "the commit of another owner"])
def test_a_heartbeat_says_when_the_claim_is_lost(platform: EventSQL, by: str) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    if by == "its release":
        platform.claims.release(claimed)
    else:
        adopted = platform.claims.adopt(claimed.id, owner="another")
        if by == "the commit of another owner":
            platform.claims.process(adopted, write)
    with platform.claims.heartbeat(claimed, lease=0.03) as lost:
        assert lost.wait(60)


def test_a_claim_that_its_owner_has_committed_is_not_lost(platform: EventSQL, until: Until) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with platform.claims.heartbeat(claimed, lease=0.03) as lost:
        with platform.database.transaction() as connection:
            platform.claims.commit(connection, claimed)
        until(lambda: has_ended(claimed))
        assert not lost.is_set()


def test_a_heartbeat_ends_though_its_own_transaction_holds_the_partition(
    platform: EventSQL, until_blocked: UntilBlocked
) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    with platform.database.transaction() as connection:
        with platform.claims.heartbeat(claimed, lease=0.3):
            platform.claims.check(connection, claimed)
            until_blocked()
        platform.claims.commit(connection, claimed)
    assert platform.claims.get(claimed.id)[1] == "committed"


@pytest.mark.parametrize("end", ["commit", "release"])
def test_a_renewal_that_waited_for_the_end_of_its_claim_leaves_no_lease(
    platform: EventSQL, until_blocked: UntilBlocked, end: str
) -> None:
    """The events after the claim would wait until the lease is over, and nobody would consume them."""
    fill(platform, 4)
    claimed = claim(platform, max_events=2)
    with ThreadPoolExecutor(1) as executor:
        with platform.database.transaction() as connection:
            platform.claims.check(connection, claimed)
            renewal = executor.submit(platform.claims.renew, claimed)
            until_blocked()
            if end == "commit":
                platform.claims.commit(connection, claimed)
            else:
                finish_claim(connection, Queries("log", "eventsql"), claimed, "released")
        with pytest.raises(ClaimLostError):
            renewal.result()
    (state,) = platform.registry.consumer("orders", "whole")
    assert (state.lease_owner, state.lease_expires_at) == (None, None)
    claim(platform, owner="another")


def test_a_block_waits_for_its_heartbeat_no_longer_than_the_lease(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(platform, 4)
    claimed = claim(platform)
    asked, answer = threading.Event(), threading.Event()

    def stands_still(*_: object, **__: object) -> None:
        asked.set()
        answer.wait()

    monkeypatch.setattr(Claims, "renew", stands_still)
    with platform.claims.heartbeat(claimed, lease=0.03) as lost:
        assert asked.wait(PATIENCE)
    assert not lost.is_set()
    answer.set()


def test_taking_over_does_not_wait_for_ever_for_an_owner_that_hangs(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "LOCK_TIMEOUT", 0.05)
    fill(platform, 4)
    claimed = claim(platform)
    with platform.database.transaction() as hanging:
        platform.claims.check(hanging, claimed)
        for take in (
            lambda: platform.claims.adopt(claimed.id, owner="another"),
            lambda: platform.claims.release(claimed),
            lambda: platform.claims.renew(claimed),
        ):
            with pytest.raises(DatabaseBusyError):
                take()
    assert platform.claims.release(claimed)


# Processes


def test_a_process_that_is_killed_in_mid_batch_loses_and_repeats_nothing(platform: EventSQL, spawn: Spawn) -> None:
    ids = fill(platform, 60)
    claimed = claim(platform, max_events=50)
    doomed = spawn("hold_claim", claimed.id, 20, 3_600.0)
    assert doomed.line() == "in mid-batch"
    doomed.kill()
    assert effects(platform) == ids[:20]
    # Nobody says that it is dead: its lease does.
    let_expire(platform)
    successor = claim(platform, owner="next")
    assert successor.range.after == ids[19]
    assert platform.claims.process(successor, write).consumed == 40
    assert effects(platform) == ids
    assert platform.registry.consumer("orders", "whole")[0].consumed_events == 60


def test_a_process_inside_a_batch_cannot_be_overtaken(platform: EventSQL, spawn: Spawn) -> None:
    ids = fill(platform, 60)
    claimed = claim(platform)
    slow = spawn("hold_claim", claimed.id, 20, 0.01)
    assert slow.line() == "in mid-batch"
    # Its lease has expired long since; the row that it has locked keeps others out.
    assert refusal(platform, owner="next") == "another consumption has the partition locked"
    slow.tell("go on")
    assert slow.end() == 0
    assert effects(platform) == ids


# What it asks of the server


def test_claiming_and_processing_take_a_fixed_number_of_statements(platform: EventSQL, said_by: SaidBy) -> None:
    fill(platform, 900)
    said = said_by(platform.database)
    claimed = claim(platform)
    assert said.verbs() == [
        *("BEGIN", "SELECT"),
        *("SELECT", "SELECT"),
        *("UPDATE", "INSERT", "UPDATE", "COMMIT"),
    ]
    platform.claims.process(claimed, lambda _events, _connection: None)
    assert said.verbs() == [
        *("BEGIN", "SELECT", "SELECT", reading()),
        *("UPDATE", "UPDATE", "UPDATE", "COMMIT"),
    ]
    refusal(platform)
    assert said.verbs() == ["BEGIN", "SELECT", "SELECT", "SELECT", "COMMIT"]
