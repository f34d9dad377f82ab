"""Real parts for every test: one PostgreSQL for the session, one database of its own for each test."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hypothesis
import psycopg
import pytest
import sqlalchemy
from alembic.script import Script, ScriptDirectory
from psycopg import sql

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Database, migrations
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.embedded.programs import PROGRAMS_VARIABLE
from eventsql_orchestration.model import BLOCKS, ROWS, STORAGES
from eventsql_orchestration.topics import registry
from tests.fixtures import (
    memory_disk,
    said_by,
    session,
    sessions,
    single_rows,
    small_segments,
    spawn,
    terminate,
    until,
    until_blocked,
)
from tests.poolers import through
from tests.poolers.pgbouncer import PgBouncer, left_behind, running

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.scheduling import OneSparkSession

__all__ = [
    "said_by",
    "session",
    "sessions",
    "single_rows",
    "small_segments",
    "spawn",
    "terminate",
    "until",
    "until_blocked",
]

Prepared: TypeAlias = Callable[..., tuple[str, ...]]

TEMPLATE = "eventsql_template"

LONGEST = ("spark", "system", "dagster", "assets", "cli", "log", "shards")
"""The rooms whose files take longest."""

TESTS = Path(__file__).parent

STARTUP = TESTS / "startup"
"""The directory of the module that Python imports at the start of each process."""

NIGHTLY_TIMEOUT = 1800
"""Seconds that an exhaustive test may take: some take minutes on an idle machine."""

TIMEOUT_AGAIN = 60
"""Seconds after a test's timeout until its end is interrupted too, and each further time."""


def is_setting(name: str) -> bool:
    """Whether an environment variable is a setting that a test must not inherit.

    `EVENTSQL_POSTGRES` stays: it chooses the PostgreSQL of the whole run.
    """
    return name.startswith("EVENTSQL_") and name != PROGRAMS_VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    through.pytest_addoption(parser)
    parser.addoption("--storage", choices=STORAGES, default=BLOCKS, help="The form of topics that name none.")


def load_revisions_once() -> None:
    """Let Alembic load the revisions of this package and of installed ones once in a process.

    It loads all revisions of Dagster's storage twice for each instance: half of the processor time of one in memory.
    It loads all of this package's three times for each upgrade: most of the processor time of a small one.
    """
    own = str(resources.files(migrations))
    load = ScriptDirectory._load_revisions
    loaded: dict[str, list[Script]] = {}

    def load_once(scripts: ScriptDirectory) -> Iterator[Script]:
        if scripts.dir != own and "site-packages" not in Path(scripts.dir).parts:
            return load(scripts)
        if scripts.dir not in loaded:
            loaded[scripts.dir] = list(load(scripts))
        return iter(loaded[scripts.dir])

    ScriptDirectory._load_revisions = load_once  # type: ignore[assignment, method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Configure hypothesis, Alembic, Spark and the processes that tests start."""
    load_revisions_once()
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTUP) not in search_path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), *search_path]))
    registry.DEFAULT_STORAGE = config.getoption("--storage")
    # A deadline for each example would fail on a machine that is busy.
    hypothesis.settings.register_profile("tests", deadline=None)
    hypothesis.settings.load_profile("tests")
    os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "spark" / "conf")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each signal that asks a process to end be a Ctrl-C, which ends the servers of the run too.

    In a script's background, and with nohup, Python would ignore some of them, and so would the processes that tests
    start. A test of a command that heeds Ctrl-C may pass or fail by it: the run ends after that test.
    """

    def end(number: int, _frame: object) -> None:
        session.shouldstop = signal.Signals(number).name
        raise KeyboardInterrupt

    # asyncio looks for this handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of tests collect another room first.

    In a fresh clone, each compiles some of the tests for all. In one order, each would compile all of them.
    """
    report = yield
    if collector.path == TESTS and report.result:
        process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        first = len(report.result) * process // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process of tests is alone with one of them at the end.

    Exhaustive tests have time.
    """
    through.pytest_collection_modifyitems(config, items)
    for item in items:
        if item.get_closest_marker("nightly") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT))

    def place(item: pytest.Item) -> tuple[int, Path]:
        room = item.path.relative_to(TESTS).parts[0]
        return LONGEST.index(room) if room in LONGEST else len(LONGEST), item.path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Exempt all that the collection made from Python's garbage collector, which took a fifteenth of a run."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneSparkSession | None:
    """Start one Spark session for all processes of `--dist loadfile`."""
    # Not at the top: Airflow's tests run without xdist.
    from tests.scheduling import OneSparkSession

    return OneSparkSession(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Repeat a test's timeout: what a test waits for in a `finally` or in a fixture's end can hang as the test did."""
    result = yield
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, seconds, TIMEOUT_AGAIN)
    return result


@contextmanager
def own_server() -> Iterator[EmbeddedPostgres]:
    """An embedded server, not started yet, in a directory where nothing else is; nothing is left of it afterwards."""
    # Not pytest's own temporary directory: only root may enter that, and PostgreSQL does not run as root.
    home = Path(tempfile.mkdtemp(prefix="eventsql-tests-", dir=memory_disk()))
    home.chmod(0o755)
    embedded = EmbeddedPostgres(home / "postgres")
    try:
        yield embedded
    finally:
        embedded.destroy()
        shutil.rmtree(home, ignore_errors=True)


def hash_password(connection: psycopg.Connection[Any], *, times: int) -> None:
    """Let sessions of the connection's role hash its password so many times, on PostgreSQL 16 or later.

    The default of 4,096 times takes 5 ms of a new session.
    """
    if connection.info.server_version < 160000:
        return
    role, password = sql.Identifier(connection.info.user), sql.Literal(connection.info.password)
    connection.execute(sql.SQL("SET scram_iterations TO {}").format(times))
    connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, password))


def rewrite_catalogs(dsn: str) -> None:
    """Leave a seventh fewer files in a database: a copy of it takes 14 ms of processor time, and 16 ms before."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        catalogs = connection.execute(
            "SELECT relname FROM pg_class "
            "WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r' AND NOT relisshared"
        ).fetchall()
        names = sql.SQL(", ").join(sql.Identifier("pg_catalog", name) for (name,) in catalogs)
        connection.execute(sql.SQL("VACUUM (FULL) {}").format(names))
    # This session leaves the file of the catalogs' descriptions that VACUUM removed. Without it, the first session of
    # each copy would take 2 ms of processor time to make its own.
    psycopg.connect(dsn).close()


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """An embedded server whose template database holds the platform's empty tables."""
    with own_server() as embedded:
        with embedded.start().connect() as connection:
            # No test outlives its machine, and a killed server has given what it wrote to the kernel.
            connection.execute("ALTER SYSTEM SET fsync TO off")
            connection.execute("ALTER SYSTEM SET full_page_writes TO off")
            # Its transactions would hold back the changes of stores, in each database of the server.
            connection.execute("ALTER SYSTEM SET autovacuum TO off")
            # The copy of a database looks at all buffers twice.
            connection.execute("ALTER SYSTEM SET shared_buffers TO '128MB'")
            hash_password(connection, times=1)
        embedded.stop()
        database = Database(embedded.create_database(TEMPLATE))
        database.migrate()
        database.close()
        rewrite_catalogs(database.dsn)
        yield embedded


@pytest.fixture(scope="session")
def password_for_java(server: EmbeddedPostgres) -> None:
    """Java's driver refuses to hash a password fewer times than by default."""
    with server.start().connect() as connection:
        hash_password(connection, times=4096)


class Administrator:
    """A session on the server's own database that makes and drops the databases of tests.

    It stays open. A session for each statement would take a tenth of a run's processor time.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._connect()

    @contextmanager
    def copied(self, name: str | None = None, *, template: str = TEMPLATE) -> Iterator[str]:
        """A copy of a database, of a random name by default. Gives its DSN, and drops it at the end."""
        name = name or f"test_{uuid.uuid4().hex}"
        dsn = self.copy(name, template=template)
        try:
            yield dsn
        finally:
            self._drop(name)

    def copy(self, name: str, *, template: str = TEMPLATE) -> str:
        """Copy a database, file by file, and give the DSN of the copy.

        Copying the template takes 15 ms as files in memory, 60 ms on a disk, and 200 ms through the WAL, as is the
        default.
        """
        # PostgreSQL 14 knows no other way, and not the word for it.
        way = sql.SQL("STRATEGY file_copy" if self._connection.info.server_version >= 150000 else "")
        copy = sql.SQL("CREATE DATABASE {} TEMPLATE {} {}")
        self._execute(copy.format(sql.Identifier(name), sql.Identifier(template), way))
        return self._running.dsn_for(name)

    @contextmanager
    def refusing(self, dsn: str) -> Iterator[None]:
        """Let a database refuse new connections in the block."""
        name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]))
        self._execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        try:
            yield
        finally:
            self._execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))

    def drop_roles(self, prefix: str) -> None:
        """Drop the roles whose names begin so. The databases in which they had something are dropped already."""
        names = self._connection.execute("SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [prefix])
        for (name,) in names.fetchall():
            self._execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))

    def close(self) -> None:
        self._connection.close()

    def _connect(self) -> None:
        self._running = self._server.start()
        self._connection = self._running.connect()

    def _drop(self, name: str) -> None:
        # A session takes a moment to end after a test has closed it, and DROP DATABASE looks again after 100 ms.
        sessions = sql.SQL("SELECT FROM pg_stat_activity WHERE datname = {}").format(sql.Literal(name))
        ended = time.monotonic() + 0.05
        while self._execute(sessions).rowcount and time.monotonic() < ended:
            time.sleep(0.002)
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _execute(self, statement: sql.Composed) -> psycopg.Cursor[Any]:
        try:
            return self._connection.execute(statement)
        except psycopg.OperationalError:
            if not self._connection.closed:
                raise
            # A test has restarted the server.
            self._connect()
            return self._connection.execute(statement)


@pytest.fixture(scope="session")
def administrator(server: EmbeddedPostgres) -> Iterator[Administrator]:
    opened = Administrator(server)
    yield opened
    opened.close()


@pytest.fixture
def fresh(administrator: Administrator) -> Iterator[str]:
    """A database with nothing in it."""
    with administrator.copied(template="template1") as dsn:
        yield dsn


@pytest.fixture(scope="module")
def prepared(administrator: Administrator) -> Iterator[Prepared]:
    """Databases that a module's tests copy. A function fills each once.

    Making a topic takes 45 to 75 ms, and copying it less than 1 ms.
    """
    made: dict[tuple[object, ...], tuple[str, ...]] = {}
    with ExitStack() as stack:

        def prepare(fill: Callable[..., object], *arguments: Hashable, databases: int = 1) -> tuple[str, ...]:
            key = (fill, arguments, databases, registry.DEFAULT_STORAGE)
            if key not in made:
                names = tuple(f"prepared_{uuid.uuid4().hex}" for _ in range(databases))
                dsns = [stack.enter_context(administrator.copied(name)) for name in names]
                with EventSQL(*dsns, transfer=False) as platform:
                    fill(platform, *arguments)
                made[key] = names
            return made[key]

        yield prepare


@pytest.fixture
def template(request: pytest.FixtureRequest) -> str:
    """The database that the test's own is a copy of: empty, or as the function of the mark `prepared` fills it."""
    mark = request.node.get_closest_marker("prepared")
    if mark is None or ("fixture" in mark.kwargs and mark.kwargs["fixture"] not in request.fixturenames):
        return TEMPLATE
    prepared: Prepared = request.getfixturevalue("prepared")
    return prepared(*mark.args)[0]


@pytest.fixture
def direct_dsn(administrator: Administrator, template: str) -> Iterator[str]:
    """A migrated database of the test's own, past any pooler."""
    with administrator.copied(template=template) as dsn:
        yield dsn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that are marked so with logs in rows and in blocks."""
    if metafunc.definition.get_closest_marker("both_forms") is not None:
        metafunc.parametrize("form", STORAGES, indirect=True)


@pytest.fixture(autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of topics that name none: that of the run, or the one that a test's mark says."""
    if hasattr(request, "param"):
        monkeypatch.setattr(registry, "DEFAULT_STORAGE", request.param)
    elif request.node.get_closest_marker("in_rows") is not None:
        monkeypatch.setattr(registry, "DEFAULT_STORAGE", ROWS)


@pytest.fixture(scope="session")
def pooler(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[PgBouncer | None]:
    """The pooler through which this run goes, with `--through-pooler`."""
    if not request.config.getoption(through.OPTION):
        yield None
        return
    with running(server.start().dsn, servers=through.SERVERS) as started:
        yield started


@pytest.fixture
def dsn(direct_dsn: str, pooler: PgBouncer | None) -> Iterator[str]:
    """The test's database as the platform is to reach it; what goes through a pooler leaves nothing on its sessions."""
    if pooler is None:
        yield direct_dsn
        return
    yield pooler.url(direct_dsn)
    assert left_behind(pooler.url(direct_dsn), servers=through.sessions(direct_dsn)) == []


@pytest.fixture
def database(dsn: str) -> Iterator[Database]:
    with Database(dsn) as opened:
        yield opened


@pytest.fixture
def nowhere() -> Iterator[Database]:
    """A database that cannot be reached: what is refused with it was refused before anything was asked of it."""
    with Database("postgresql://someone:secret@127.0.0.1:1/nowhere") as unreachable:
        yield unreachable


@pytest.fixture
def platform(dsn: str) -> Iterator[EventSQL]:
    """The platform on the test's database; events move only when the test transfers them."""
    with EventSQL(dsn, transfer=False) as opened:
        yield opened


@pytest.fixture
def engine(dsn: str) -> Iterator[sqlalchemy.Engine]:
    """SQLAlchemy's engine of a caller, for the test's database."""
    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()
