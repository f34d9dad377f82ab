"""Roles of a test's own: the server has them for all databases, so each test takes another prefix."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TypeAlias

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database.roles import Roles

Login: TypeAlias = Callable[..., str]
As: TypeAlias = Callable[..., EventSQL]


@pytest.fixture
def prefix() -> str:
    return f"r{uuid.uuid4().hex[:8]}"


@pytest.fixture
def owner(direct_dsn: str, prefix: str) -> Iterator[EventSQL]:
    """The platform as a superuser, with two topics, their dead letter topics and consumers, and roles of `orders`."""
    with EventSQL(direct_dsn, transfer=False) as platform:
        for topic in ("orders", "orders_dlt", "payments", "payments_dlt"):
            platform.registry.register_topic(Topic(topic, partitions=2))
        for topic in ("orders", "payments"):
            platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
        roles = Roles(platform.database)
        roles.create(prefix=prefix, topics=["orders"])
        yield platform
        roles.drop()


@pytest.fixture
def login(owner: EventSQL, direct_dsn: str, prefix: str) -> Iterator[Login]:
    """Makes a login that is a member of roles, named without their prefix; gives its URL."""
    made: list[str] = []

    def make(*roles: str, options: str = "") -> str:
        name = f"{prefix}_login_{len(made)}"
        with psycopg.connect(direct_dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
            made.append(name)
            for role in roles:
                connection.execute(
                    sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"{prefix}_{role}"), sql.Identifier(name))
                )
        url = make_url(direct_dsn).set(username=name, password="x")
        if options:
            url = url.update_query_dict({"options": options})
        return url.render_as_string(hide_password=False)

    yield make
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        for name in made:
            connection.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def as_(login: Login) -> Iterator[As]:
    """Opens the platform as a login that is a member of roles."""
    opened: list[EventSQL] = []

    def open_as(*roles: str, transfer: bool = False) -> EventSQL:
        opened.append(EventSQL(login(*roles), transfer=transfer))
        return opened[-1]

    yield open_as
    for platform in opened:
        platform.close()
