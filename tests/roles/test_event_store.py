"""The rights on an event store that docs/roles.md gives are enough for a service, and no more than it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.grants import ADMIN, KINDS
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.store import Change, RecordedChange, SubscriptionOptions
from tests.roles.conftest import As, Login

DOCUMENT = Path(__file__).parents[2] / "docs" / "roles.md"


@pytest.fixture
def service(login: Login, owner: EventSQL) -> Iterator[EventSQL]:
    """The platform as a login with the rights of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (grants,) = re.findall(r"appends to the event store.*?```sql\n(.*?)```", text, re.DOTALL)
    url = login()
    with owner.database.connection() as connection:
        connection.execute(grants.replace("TO shop", f'TO "{make_url(url).username}"').encode())
    with EventSQL(url, transfer=False) as platform:
        yield platform


def test_a_service_appends_loads_and_subscribes(service: EventSQL) -> None:
    handled: list[str] = []
    failing = True

    def handle(change: RecordedChange, _connection: Connection) -> None:
        if failing and change.kind == "paid":
            raise ValueError("not today")
        handled.append(change.kind)

    store = service.store
    store.append("order", "1", [Change("placed", {}), Change("paid", {})], expected_version="none")
    store.save_snapshot("order", "1", 2, {"state": "paid"})
    assert store.snapshot("order", "1") is not None
    assert len(store.load("order", "1")) == len(store.read_all()) == 2

    subscription = store.subscribe(
        "mailer", handle, background=False, options=SubscriptionOptions(max_attempts=1)
    )  # fmt: skip
    while subscription.run_once().more:
        pass
    # The first change was handled again, after the failure had undone it.
    assert (handled, len(store.dead_letters("mailer"))) == (["placed", "placed"], 1)
    failing = False
    assert subscription.redrive() == 1
    assert [lag.waiting for lag in store.subscriptions()] == [0]
    store.replay("mailer")
    store.unsubscribe("mailer")
    store.close_stream("order", "1")


def test_a_service_cannot_change_history(service: EventSQL, owner: EventSQL) -> None:
    owner.store.append("order", "1", [Change("placed", {})], expected_version=0)
    for statement in ("UPDATE eventsql.aggregate_change SET eql_kind = ''", "DELETE FROM eventsql.aggregate_change"):
        with service.database.connection() as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement.encode())
    with pytest.raises(PermissionDeniedError):
        service.store.adopt()


RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
STORE = ("aggregate", "aggregate_change", "archived_change", "aggregate_snapshot", "adopted_change", "store_home")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ADMIN])
def test_no_role_but_the_admin_has_a_right_on_the_store_or_its_archive(login: Login, kind: str) -> None:
    with psycopg.connect(login(kind)) as connection:
        found = connection.execute(
            "SELECT store, may FROM unnest(%s::text[]) store, unnest(%s::text[]) may "
            "WHERE has_table_privilege('eventsql.' || store, may)",
            [list(STORE), list(RIGHTS)],
        ).fetchall()
        assert found == []
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("TRUNCATE eventsql.archived_change")


def closed(platform: EventSQL) -> None:
    platform.store.append("order", "1", [Change("placed", {})], expected_version="none")
    platform.store.close_stream("order", "1")


def test_the_admin_archives(as_: As) -> None:
    admin = as_("admin")
    closed(admin)
    assert admin.store.archive_stream("order", "1") == 1
    assert admin.store.unarchive_stream("order", "1") == 1


def test_a_service_archives_with_the_rights_that_the_document_adds(service: EventSQL, owner: EventSQL) -> None:
    closed(service)
    with pytest.raises(PermissionDeniedError):
        service.store.archive_stream("order", "1")
    (rights, tables) = re.findall(
        r"A role that archives needs\s+`([A-Z,\s]+)` on\s+(`eventsql\.\w+` and `eventsql\.\w+`)",
        DOCUMENT.read_text(encoding="utf-8"),
    )[0]
    with owner.database.connection() as connection, service.database.connection() as other:
        grants = f'GRANT {rights} ON {tables.replace("`", "").replace(" and ", ", ")} TO "{other.info.user}"'
        connection.execute(grants.encode())
    assert service.store.archive_stream("order", "1") == 1
    assert len(service.store.load("order", "1")) == 1
    assert service.store.unarchive_stream("order", "1") == 1
    with service.database.connection() as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("TRUNCATE eventsql.aggregate_change")


def test_row_security_keeps_a_tenant_to_ids_with_its_prefix(service: EventSQL, owner: EventSQL) -> None:
    columns = {"aggregate": "eql_id", **dict.fromkeys(("aggregate_change", "aggregate_snapshot"), "eql_aggregate_id")}
    with owner.database.connection() as connection:
        for table, column in columns.items():
            policy = f"CREATE POLICY acme ON eventsql.{table} USING (starts_with({column}, 'acme/'))"
            connection.execute(f"ALTER TABLE eventsql.{table} ENABLE ROW LEVEL SECURITY; {policy}".encode())
    owner.store.append("order", "other/7", [Change("placed", {})], expected_version="any")
    for version in (1, 2):
        assert service.store.append("order", "acme/7", [Change("placed", {})], expected_version="any") == version
    service.store.save_snapshot("order", "acme/7", 2, {})
    with pytest.raises(PermissionDeniedError):
        service.store.append("order", "other/8", [Change("placed", {})], expected_version="any")
    with pytest.raises(PermissionDeniedError):
        service.store.append("order", "other/7", [Change("paid", {})], expected_version="any")
    assert service.store.load("order", "other/7") == []
    assert {change.aggregate_id for change in service.store.read_all()} == {"acme/7"}
    assert {change.aggregate_id for change in owner.store.read_all()} == {"acme/7", "other/7"}

    for aggregate_id in ("acme/7", "other/7"):
        owner.store.close_stream("order", aggregate_id)
        owner.store.archive_stream("order", aggregate_id)
    assert service.store.load("order", "other/7") == []
    assert {change.aggregate_id for change in service.store.read_all()} == {"acme/7"}
