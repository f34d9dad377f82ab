"""A call that would wait for a lock of its own thread's handler is refused, and no other call is."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.held_by_handlers import check_not_held, holding
from eventsql_orchestration.errors import ValidationError

KEY = ("consumer", "orders", "mailer", "0")


@pytest.mark.parametrize("key", [KEY, KEY[:3], KEY[:2]])
def test_a_call_that_would_wait_for_a_lock_of_its_handler_is_refused(
    sessions: Callable[[], Connection], key: tuple[str, ...]
) -> None:
    handlers, own = sessions(), sessions()
    with holding(handlers, "eventsql", "consumer 'mailer'", *KEY), pytest.raises(ValidationError):
        check_not_held(own, "eventsql", *key)
    check_not_held(own, "eventsql", *key)


def test_a_call_about_something_else_is_not_refused(sessions: Callable[[], Connection], direct_dsn: str) -> None:
    handlers, own = sessions(), sessions()
    with (
        psycopg.connect(make_conninfo(direct_dsn, dbname="postgres")) as elsewhere,
        holding(handlers, "eventsql", "consumer 'mailer'", *KEY),
    ):
        check_not_held(own, "eventsql", "consumer", "orders", "auditor")
        check_not_held(own, "another_schema", *KEY)
        check_not_held(elsewhere, "eventsql", *KEY)


def test_a_handler_whose_connection_is_closed_has_no_locks(sessions: Callable[[], Connection]) -> None:
    handlers, own = sessions(), sessions()
    with holding(handlers, "eventsql", "consumer 'mailer'", *KEY):
        handlers.close()
        check_not_held(own, "eventsql", *KEY)


def test_a_lock_that_ends_before_a_later_one_leaves_the_later_one(sessions: Callable[[], Connection]) -> None:
    handlers, own = sessions(), sessions()
    first = holding(handlers, "eventsql", "consumer 'mailer'", *KEY)
    later = holding(handlers, "eventsql", "consumer 'auditor'", "consumer", "orders", "auditor", "0")
    with first:
        later.__enter__()
    check_not_held(own, "eventsql", *KEY)
    with pytest.raises(ValidationError):
        check_not_held(own, "eventsql", "consumer", "orders", "auditor")
    later.__exit__(None, None, None)
    check_not_held(own, "eventsql", "consumer", "orders", "auditor")
