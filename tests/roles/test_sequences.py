"""The faults of sequences that each role sees and corrects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import SequenceError
from eventsql_orchestration.storage import sequences
from tests.forms import stored

if TYPE_CHECKING:
    from tests.roles.conftest import As


@pytest.mark.parametrize("role", ["reader", "reader_orders"])
def test_a_reader_is_told_of_no_fault_where_a_sequence_is_hidden_from_it(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish(Publication("orders", b"v"))
    owner.transfer.run_once()
    assert any(
        isinstance(owner.claims.claim("orders", "mailer", partition, owner="run"), Claim) for partition in range(2)
    )
    with as_(role).database.connection() as connection:
        assert sequences.faults(connection, "eventsql", ["orders"]) == []


@pytest.mark.parametrize("sequence", ["event_buffer_eql_id_seq", f"{stored('orders')}_eql_id_seq"])
def test_a_transfer_names_a_sequence_that_was_set_back_and_the_remedy_mends_it(
    owner: EventSQL, as_: As, sequence: str
) -> None:
    owner.publisher.publish_all([Publication("orders", b"v")] * 5)
    owner.transfer.run_once()
    owner.publisher.publish(Publication("orders", b"v"))
    with owner.database.connection() as connection:
        connection.execute(f"SELECT setval('eventsql.{sequence}', 1)")
    platform = as_("transfer")
    with pytest.raises(SequenceError) as caught:
        platform.transfer.run_once()
    assert sequence in caught.value.sequence
    with owner.database.connection() as connection:
        connection.execute(sql.SQL(caught.value.remedy))
    assert platform.transfer.run_once() == {"orders": 1}
