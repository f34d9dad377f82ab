"""An outbox and the platform may reach their database on different ways, past a pooler or through it."""

from __future__ import annotations

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import ValidationError
from tests.poolers.pgbouncer import PgBouncer


@pytest.mark.parametrize("platform_is_pooled", [True, False])
def test_an_outbox_past_the_pooler_or_through_it_is_in_the_same_database(
    pooled_dsn: str, direct_dsn: str, platform_is_pooled: bool
) -> None:
    theirs, mine = (pooled_dsn, direct_dsn) if platform_is_pooled else (direct_dsn, pooled_dsn)
    with EventSQL(theirs, transfer=False) as platform, psycopg.connect(mine, prepare_threshold=None) as connection:
        platform.registry.register_topic(Topic("orders"))
        for value, ending in ((b"rolled back", connection.rollback), (b"committed", connection.commit)):
            platform.publisher.publish(Publication("orders", value), connection=connection)
            platform.publisher.publish_all([Publication("orders", value)], connection=connection)
            ending()
        assert platform.transfer.run_once() == {"orders": 2}


def test_another_database_behind_the_same_pooler_is_another(
    pooled: EventSQL, pgbouncer: PgBouncer, server: EmbeddedPostgres
) -> None:
    pooled.registry.register_topic(Topic("orders"))
    another = server.create_database("another")
    try:
        with (
            psycopg.connect(pgbouncer.url(another), prepare_threshold=None) as connection,
            pytest.raises(ValidationError, match="'another'"),
        ):
            pooled.publisher.publish(Publication("orders", b""), connection=connection)
    finally:
        server.drop_database("another")
