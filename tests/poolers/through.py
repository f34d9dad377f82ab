"""`pytest --through-pooler`: the ordinary tests, with a pooler in transaction mode before the server.

Tests about the sessions of the server itself are left out, each with its reason.
"""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from tests.poolers.pgbouncer import MISSING, PROGRAM

OPTION: Final = "--through-pooler"

SERVERS: Final = 20
"""Connections of the pooler for each database: tests hold transactions open, and have many threads at work."""

_NOTIFIED = "it is about notifications, which do not arrive through a pooler"
_MARKED = "no low-water mark is kept through a pooler"
_COUNTED = "a pooler makes more statements necessary"
_ENDED = "it ends a session by its process number, which is the pooler's own invention"
_RESTARTED = "the server goes away: for a while, the pooler says so after it has come back"
_DROPPED = "the database is dropped in the middle of a COPY: what a pooler answers to that is its own"
_CONNECTED = "the server is asked for a session anew, and the pooler has one, or logs in as its own user"
_WARNED = "standard error tells of the pooler"
_SESSION = "the test itself keeps something on a session"

LEFT_OUT: Final[dict[str, str]] = {
    "tests/database/test_notifications.py": _NOTIFIED,
    "tests/topics/test_log_plans.py": _SESSION,
    "tests/log/test_plans_at_scale.py": _SESSION,
    "tests/queue/test_queue_plans.py": _SESSION,
    "tests/consuming/test_interleavings.py": _ENDED,
    "tests/maintenance/test_change_interleavings.py": _SESSION,
    "tests/log/test_faults.py": _RESTARTED,
    "tests/log/test_stateful.py": _SESSION,
    "tests/publishing/test_conformance.py::test_a_server_that_goes_away": _RESTARTED,
    "tests/consuming/test_consumers.py::test_a_process_that_transfers_wakes": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_a_publisher_without_a_transfer_wakes": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_a_notification_during": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_events_that_nobody_notifies_of": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_a_consumer_polls_at_its_pace_while": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_an_event_that_failed_is_retried_when_it_is_due_though": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_too_few_events": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_a_resumed_consumer": _NOTIFIED,
    "tests/consuming/test_consumers.py::test_an_idle_consumer_of_many_partitions": _NOTIFIED,
    "tests/consuming/test_failures.py::test_the_events_behind_a_dead_letter_wait_for_no_notification": _NOTIFIED,
    "tests/consuming/test_leases.py::test_an_event_that_is_due_again_at_once": _NOTIFIED,
    "tests/publishing/test_outbox.py::test_a_transfer_looks_again_and_again": _NOTIFIED,
    "tests/queue/test_features.py::test_a_receiver_hears_of_a_message": _NOTIFIED,
    "tests/queue/test_features.py::test_archived_messages_are_kept": _SESSION,
    "tests/queue/test_features.py::test_messages_of_the_first_and_the_last_day": _SESSION,
    "tests/store/test_subscription.py::test_a_running_subscription_is_woken": _NOTIFIED,
    "tests/publishing/test_transfer.py::test_the_mark_": _MARKED,
    "tests/publishing/test_transfer.py::test_a_look_sends_no_marks": _MARKED,
    "tests/publishing/test_transfer.py::test_the_server_compiles_no_statement": _SESSION,
    "tests/publishing/test_statement.py::test_a_drivers_own_encoder": _SESSION,
    "tests/publishing/test_statement.py::test_a_service_commits": _SESSION,
    "tests/database/test_single_statement.py::test_a_connection_prepares": _SESSION,
    "tests/database/test_single_statement.py::test_a_plan_of_a_briefly": _SESSION,
    "tests/publishing/test_transfer.py::test_an_idle_look_is_one_statement": _COUNTED,
    "tests/publishing/test_straight.py::test_a_batch_takes_the_same_few_statements": _COUNTED,
    "tests/publishing/test_straight.py::test_moving_the_buffered_events_takes_four": _COUNTED,
    "tests/publishing/test_straight.py::test_a_batch_waits_for_a_migration": _MARKED,
    "tests/publishing/test_transfer.py::test_an_event_of_a_prepared_transaction": _RESTARTED,
    "tests/publishing/test_transfer.py::test_a_server_that_is_down": _RESTARTED,
    "tests/publishing/test_transfer.py::test_a_server_that_restarted": _RESTARTED,
    "tests/consuming/test_lost_connections.py::test_an_event_that_takes_the_server_down": _RESTARTED,
    "tests/publishing/test_transfer.py::test_the_loop_waits_for_a_server": _RESTARTED,
    "tests/storage/test_segments.py::test_a_table_that_something_hangs_on": _SESSION,
    "tests/cli/test_program.py::test_a_database_that_goes_away": _DROPPED,
    "tests/cli/test_doctor.py::test_a_database_that_takes_no_writes": _CONNECTED,
    "tests/cli/test_doctor.py::test_a_server_that_refuses_a_login": _CONNECTED,
    "tests/cli/test_program.py::test_a_wrong_password": _CONNECTED,
    "tests/cli/test_program.py::test_the_doctor_tells_a_role_without_rights": _CONNECTED,
    "tests/cli/test_store.py::test_lag_and_doctor_tell_which_process": _ENDED,
    "tests/cli/test_events.py::test_following_": _WARNED,
    "tests/cli/test_events.py::test_ctrl_c_": _WARNED,
}
"""Tests that make no sense through a pooler, by the beginnings of their names, with the reason."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="reach the tests' databases through PgBouncer in transaction mode"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption(OPTION):
        return
    if PROGRAM is None:
        raise pytest.UsageError(MISSING)
    out = [item for item in items if any(item.nodeid.startswith(each) for each in LEFT_OUT)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


def sessions(dsn: str) -> int:
    """How many sessions a database has on its server."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchone()
    return 0 if row is None else row[0]
