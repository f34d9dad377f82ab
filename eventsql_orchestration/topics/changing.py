"""Changing how the log of a topic is stored while it is used: its form, and the compression of its blocks."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from eventsql_orchestration.database import Connection as DriverConnection
from eventsql_orchestration.database import Database, driver_connection, role_statements
from eventsql_orchestration.database.sessions import let_last, wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError
from eventsql_orchestration.model import Compression, Storage, Topic
from eventsql_orchestration.retry import while_busy
from eventsql_orchestration.storage import altering, compressing, log_form, segments
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.exchanging import WAIT_SECONDS
from eventsql_orchestration.storage.segment_drops import try_retain
from eventsql_orchestration.topics.catalog import existing_topic, lock_registry, lock_topic


def change_storage(database: Database, name: str, storage: Storage, *, timeout: float) -> bool:
    """Let new events of a topic have a form. Raises as `ClusterRegistry.set_storage`."""
    schema = database.schema

    def attempt() -> bool:
        dedicated = database.dedicated
        with database.errors(), dedicated() as driver, dedicated() as holder, holder.transaction():
            # Retention adopts a plain table too. Of two adoptions at once, each would undo steps of the other.
            _keep_retention_away(holder, schema, name)
            let_last(holder)
            segments.adopt(driver, schema, name, "another form")
        with database.core() as connection:
            driver = driver_connection(connection)
            topic, has_roles = _take_log(connection, schema, name)
            changed = altering.change(driver, schema, topic, storage)
            if changed and has_roles:
                role_statements.grant(driver, schema, [name])
        log_form.forget(driver, schema, name)
        return changed

    return _retried(name, "form", timeout, attempt)


def change_compression(database: Database, name: str, compression: Compression, *, timeout: float) -> bool:
    """Let new blocks of a topic have a compression. Raises as `ClusterRegistry.set_compression`."""
    schema = database.schema

    def attempt() -> bool:
        with database.core() as connection:
            driver = driver_connection(connection)
            compressing.check_available(driver, schema, compression)
            topic, _ = _take_log(connection, schema, name)
            if topic.compression == compression:
                return False
            form, tables = log_form.form_in_transaction(driver, schema, name), list[str]()
            if form.blocks:
                log = log_form.store(name, form, blocks=True)
                own = [each.table for each in segments.segments(driver, schema, name) or () if each.log == log]
                tables = [log, *own]
            compressing.change(driver, schema, name, tables, compression)
            return True

    return _retried(name, "compression", timeout, attempt)


def _retried(name: str, what: str, timeout: float, attempt: Callable[[], bool]) -> bool:
    def message(error: DatabaseBusyError) -> str:
        return f"topic {name!r} keeps its {what}, because it is in use: {error}"

    return while_busy(attempt, seconds=timeout, message=message)


def _take_log(connection: Connection, schema: str, name: str) -> tuple[Topic, bool]:
    """Let nobody else write to a log, or retain or erase its events, until the transaction ends.

    Gives the topic, and whether the database has roles. Waits for other transactions for `WAIT_SECONDS`.
    """
    driver = driver_connection(connection)
    has_roles = role_statements.act_as_owner(driver, schema)
    lock_registry(connection)
    wait_at_most(driver, WAIT_SECONDS)
    _keep_retention_away(driver, schema, name)
    if not try_change(driver, schema, name):
        raise DatabaseBusyError(f"an erasure of events of topic {name!r} is under way: try again when it has ended")
    topic = existing_topic(connection, name)
    lock_topic(connection, name)
    return topic, has_roles


def _keep_retention_away(connection: DriverConnection, schema: str, name: str) -> None:
    """Let no program retain a topic until the caller's transaction ends. Raises `DatabaseBusyError` if one does now."""
    if not try_retain(connection, schema, name):
        raise DatabaseBusyError(f"retention of topic {name!r} is under way: try again when it has ended")
