"""Staged blocks are published whole and in the order of their attempts, as events of the buffer or as blocks."""

from __future__ import annotations

import uuid
from itertools import chain

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.publishing import staged_blocks
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks
from tests.staging import stage_blocks


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 1))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture(params=["few", "LEAST_BY_BLOCKS", "MOST_COPIED"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rows of the buffer four blocks of six events become: many events, or large ones, stay blocks."""
    if request.param == "few":
        return 6
    monkeypatch.setattr(staged_blocks, request.param, 1)
    return 4


@pytest.fixture
def attempts(platform: EventSQL) -> dict[uuid.UUID, list[bytes]]:
    """Two attempts with two staged blocks each, and their values, in another order than that of their ids."""
    staged = {}
    for values in ([b"1", b"2", b"3"], [b"4", b"5", b"6"]):
        first, second, third = (Publication("orders", value) for value in values)
        staged[stage_blocks(platform, [first, second], [third])] = values
    return dict(sorted(staged.items(), reverse=True))


def test_blocks_are_published_in_the_order_of_their_attempts(
    platform: EventSQL, attempts: dict[uuid.UUID, list[bytes]], rows: int
) -> None:
    staged, of = StagedBlocks("eventsql"), list(attempts)
    with platform.database.transaction() as connection:
        staged.publish(connection, of, staged.find(connection, of))
        assert connection.execute("SELECT count(*) FROM eventsql.event_buffer").fetchone() == (rows,)
        staged.delete(connection, of)
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [*chain(*attempts.values())]


@pytest.mark.usefixtures("rows")
def test_a_block_that_is_deleted_after_the_look_fails_the_publication(
    platform: EventSQL, attempts: dict[uuid.UUID, list[bytes]], session: Connection
) -> None:
    staged, of = StagedBlocks("eventsql"), list(attempts)
    with pytest.raises(DatabaseError), platform.database.transaction() as connection:
        found = staged.find(connection, of)
        # As a sweep does, or an abort of the same write.
        staged.delete(session, of[1:])
        staged.publish(connection, of, found)
    assert platform.buffered() == {}


@pytest.mark.usefixtures("rows")
def test_blocks_that_another_program_publishes_after_the_look_are_published_once(
    platform: EventSQL, attempts: dict[uuid.UUID, list[bytes]], session: Connection
) -> None:
    staged, of = StagedBlocks("eventsql"), list(attempts)
    with pytest.raises(DatabaseError), platform.database.transaction() as connection:
        found = staged.find(connection, of)
        staged.publish(session, of, staged.find(session, of))
        staged.delete(session, of)
        staged.publish(connection, of, found)
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [*chain(*attempts.values())]
