"""Statements that the server refuses."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
import pytest


def check_refused(session: psycopg.Connection, statements: Iterable[str], error: type[psycopg.Error]) -> None:
    """Each statement raises `error`."""
    for statement in statements:
        with pytest.raises(error):
            session.execute(statement.encode())
            pytest.fail(statement)
