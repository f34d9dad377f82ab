"""Roles for tests. The server has them for all databases: each module, and each test that changes roles, has a prefix.

Making the roles takes longer than most tests do. Tests that change no role share those of their module.
"""

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


def new_prefix() -> str:
    return f"r{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_roles() -> None:
    """For a test that makes or drops roles: its roles are its own."""


@pytest.fixture(scope="module")
def shared_prefix(administrator: Administrator) -> Iterator[str]:
    """The prefix of the roles that the tests of a module share."""
    prefix = new_prefix()
    yield prefix
    administrator.drop_roles(prefix)


@pytest.fixture(autouse=True)
def prefix(request: pytest.FixtureRequest, administrator: Administrator, shared_prefix: str) -> Iterator[str]:
    """The prefix of the test's roles. Made first: databases are dropped before the roles that have rights there."""
    own = "owner" not in request.fixturenames or "own_roles" in request.fixturenames
    prefix = new_prefix() if own else shared_prefix
    yield prefix
    administrator.drop_roles(prefix if own else f"{prefix}_login")


def prepare(platform: EventSQL, prefix: str | None = None) -> None:
    for topic in ("orders", "orders_dlt", "payments", "payments_dlt"):
        platform.registry.register_topic(Topic(topic, partitions=2))
    for topic in ("orders", "payments"):
        platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
    if prefix is not None:
        make_roles(platform, prefix)


def make_roles(platform: EventSQL, prefix: str) -> None:
    Roles(platform.database).create(prefix=prefix, topics=["orders"])


@pytest.fixture
def template(request: pytest.FixtureRequest, prefix: str, shared_prefix: str, prepared: Prepared) -> str:
    if "owner" not in request.fixturenames:
        return TEMPLATE
    return prepared(prepare, *([prefix] if prefix == shared_prefix else []))[0]


@pytest.fixture
def owner(direct_dsn: str, prefix: str, shared_prefix: str) -> Iterator[EventSQL]:
    """The platform as a superuser, with two topics, their dead letter topics and consumers, and roles of `orders`."""
    with EventSQL(direct_dsn, transfer=False) as platform:
        if prefix != shared_prefix:
            make_roles(platform, prefix)
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
