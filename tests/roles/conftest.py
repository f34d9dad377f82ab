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
from tests.conftest import TEMPLATE, Administrator, Prepared

Login: TypeAlias = Callable[..., str]
As: TypeAlias = Callable[..., EventSQL]


@pytest.fixture(autouse=True)
def prefix(administrator: Administrator) -> Iterator[str]:
    """A prefix of roles. Made before all else: the database with what belongs to the roles is dropped before them."""
    prefix = f"r{uuid.uuid4().hex[:8]}"
    yield prefix
    administrator.drop_roles(prefix)


def prepare(platform: EventSQL) -> None:
    for topic in ("orders", "orders_dlt", "payments", "payments_dlt"):
        platform.registry.register_topic(Topic(topic, partitions=2))
    for topic in ("orders", "payments"):
        platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))


@pytest.fixture
def template(request: pytest.FixtureRequest, prepared: Prepared) -> str:
    return prepared(prepare)[0] if "owner" in request.fixturenames else TEMPLATE


@pytest.fixture
def owner(direct_dsn: str, prefix: str) -> Iterator[EventSQL]:
    """The platform as a superuser, with two topics, their dead letter topics and consumers, and roles of `orders`."""
    with EventSQL(direct_dsn, transfer=False) as platform:
        Roles(platform.database).create(prefix=prefix, topics=["orders"])
        yield platform


@pytest.fixture
def login(owner: EventSQL, direct_dsn: str, prefix: str) -> Login:
    """Makes a login that is a member of roles, named without their prefix; gives its URL."""
    made = 0

    def make(*roles: str, options: str = "") -> str:
        nonlocal made
        name = f"{prefix}_login_{made}"
        made += 1
        with psycopg.connect(direct_dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
            for role in roles:
                connection.execute(
                    sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"{prefix}_{role}"), sql.Identifier(name))
                )
        url = make_url(direct_dsn).set(username=name, password="x")
        if options:
            url = url.update_query_dict({"options": options})
        return url.render_as_string(hide_password=False)

    return make


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
