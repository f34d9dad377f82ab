"""Real parts for every test: one PostgreSQL for the session, one database of its own for each test."""

from __future__ import annotations

import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres

TEMPLATE = "eventsql_template"


def pytest_configure() -> None:
    """Heed SIGINT, so that the programs under test do: started in the background of a script, both would ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """An embedded server whose template database holds the platform's empty tables."""
    # Not pytest's own temporary directory: only root may enter that, and PostgreSQL does not run as root.
    home = Path(tempfile.mkdtemp(prefix="eventsql-tests-"))
    home.chmod(0o755)
    embedded = EmbeddedPostgres(home / "postgres")
    try:
        embedded.start()
        database = Database(embedded.create_database(TEMPLATE))
        database.migrate()
        database.close()
        yield embedded
    finally:
        embedded.destroy()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def dsn(server: EmbeddedPostgres) -> Iterator[str]:
    """A migrated database of the test's own (copying the template takes about 50 ms)."""
    name = f"test_{uuid.uuid4().hex}"
    yield server.create_database(name, template=TEMPLATE)
    server.drop_database(name)


@pytest.fixture
def database(dsn: str) -> Iterator[Database]:
    with Database(dsn) as opened:
        yield opened


@pytest.fixture
def platform(dsn: str) -> Iterator[EventSQL]:
    """The platform on the test's database; events move only when the test transfers them."""
    with EventSQL(dsn, transfer=False) as opened:
        yield opened
