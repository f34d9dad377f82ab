"""Roles on several shards: each role does its work on all of them, also after another shard has joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import EventSQL, Publication, Shard
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.shard_state import ShardStore
from tests.conftest import Administrator
from tests.roles.conftest import As, prepare


@pytest.fixture
def dsns(administrator: Administrator, prefix: str) -> Iterator[list[str]]:
    """Three shards with roles, of which one has joined two."""
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied()) for _ in range(3)]
        with EventSQL(*dsns[:2], transfer=False) as platform:
            prepare(platform)
            platform.publisher.publish_all([Publication("orders", b"v", key=str(number)) for number in range(20)])
            platform.transfer.run_once()
        shards = [stack.enter_context(Shard(dsn, transfer=False)) for dsn in dsns]
        ShardAddition(shards[:-1], shards[-1]).execute()
        for shard in shards:
            Roles(shard.database).create(prefix=prefix)
        yield dsns


@pytest.fixture
def as_(dsns: list[str], prefix: str) -> Iterator[As]:
    """Opens the platform on the shards as a login that is a member of roles."""
    with ExitStack() as stack:

        def open_as(*roles: str) -> EventSQL:
            login = "_".join((prefix, "login", *roles))
            with psycopg.connect(dsns[0], autocommit=True) as connection:
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(login)))
                for role in roles:
                    named = sql.Identifier(f"{prefix}_{role}"), sql.Identifier(login)
                    connection.execute(sql.SQL("GRANT {} TO {}").format(*named))
            urls = [make_url(dsn).set(username=login, password="x") for dsn in dsns]
            platform = EventSQL(*(url.render_as_string(hide_password=False) for url in urls), transfer=False)
            return stack.enter_context(platform)

        yield open_as


def test_a_transfer_leaves_consumers_of_a_new_shard_to_programs_that_consume(as_: As) -> None:
    publishing, transferring, consuming = as_("publisher"), as_("transfer", "stager"), as_("consumer")
    consumed = 0
    for _ in range(2):
        publishing.publisher.publish_all([Publication("orders", b"v", key=str(number)) for number in range(60)])
        assert transferring.transfer.run_once() == {"orders": 60}
        consumed += consuming.consumers.consume_once("orders", "mailer", lambda *_: None)
    assert consumed == 20 + 2 * 60


def test_a_transfer_asks_for_no_consumers_that_its_role_may_not_see(as_: As, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would log an error in each second."""
    asked: list[ShardStore] = []
    held = ShardStore.held

    def ask(store: ShardStore) -> list[tuple[str, str]]:
        asked.append(store)
        return held(store)

    monkeypatch.setattr(ShardStore, "held", ask)
    as_("transfer", "stager").transfer.run_once()
    assert asked == []
    as_("transfer", "stager", "consumer").transfer.run_once()
    assert len(asked) == 1


def test_a_transfer_that_may_release_consumers_tells_which_other_right_it_lacks(
    as_: As, dsns: list[str], prefix: str
) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            role = sql.Identifier(f"{prefix}_consumer")
            connection.execute(sql.SQL("REVOKE SELECT ON eventsql.shard_fence FROM {}").format(role))
    with pytest.raises(PermissionDeniedError, match="shard_fence"):
        as_("transfer", "stager", "consumer").transfer.run_once()
