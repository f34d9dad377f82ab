"""The embedded server of a directory: initialised, started, asked and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

from eventsql_orchestration.database.embedded.complaints import database_errors, failure, os_errors, read_from
from eventsql_orchestration.database.embedded.configuration import HOST, configuration, memory_bytes, server_settings
from eventsql_orchestration.database.embedded.files import POLL, free_port, is_free_port, lock_file, write_file
from eventsql_orchestration.database.embedded.postmaster import Postmaster, remove_misleading_files
from eventsql_orchestration.database.embedded.programs import (
    Account,
    chown_tree,
    find_programs,
    is_relocated,
    make_public_directory,
    new_relocated_home,
    reachable_programs,
    run_program,
    server_account,
    version_of,
)
from eventsql_orchestration.errors import EmbeddedServerError

_logger = logging.getLogger(__name__)

StopMode = Literal["fast", "immediate", "smart"]

_ROLE = "eventsql"
_DATABASE = "eventsql"

_BUILTIN_LOCALE = ("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8")
_BUILTIN_SINCE = 17

_PORT_ATTEMPTS = 5
_LOG_BYTES = 1024 * 1024

_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


@dataclass(frozen=True)
class EmbeddedServer:
    """A running embedded server. Its text form leaves the password out; `dsn` carries it."""

    directory: Path
    data_directory: Path
    port: int
    pid: int
    password: str = field(repr=False)

    @property
    def dsn(self) -> str:
        """The URL of the database `eventsql`, password included."""
        return self.dsn_for(_DATABASE)

    def dsn_for(self, database: str) -> str:
        """The URL of another database of this server, password included; the database need not exist."""
        return f"postgresql://{_ROLE}:{self.password}@{HOST}:{self.port}/{quote(database, safe='')}"

    def version(self) -> str | None:
        """PostgreSQL's version, as the server tells; None where it has no connection to spare."""
        try:
            with contextlib.closing(_connect(self, _DATABASE)) as connection:
                return connection.info.parameter_status("server_version")
        except psycopg.OperationalError:
            return None


class EmbeddedPostgres:
    """The embedded server of a directory.

    Any number of processes may hold one of these for the same directory: `start` and `stop` take turns through a
    lock file, and whoever calls `start` gets the one server.

    Under root the server runs as the account `pgserver`. Where that account cannot reach the directory (a clone in
    /root, pytest's temporary directories), the data lies in /var/lib/eventsql and `data` is a symlink to it; remove
    such a directory with `destroy`, which removes both.
    """

    def __init__(self, directory: Path) -> None:
        """Name the directory (made absolute); nothing is read or written."""
        self.directory = directory.absolute()

    def start(self, *, timeout: float = 60.0) -> EmbeddedServer:
        """Return the running server; initialise and start it first where that is needed.

        `timeout` (seconds) bounds all of it: waiting for other processes, initdb and crash recovery. A recovery that
        takes longer goes on, and the next call waits for it again.

        Raises `MissingExtraError` when the package with the server is not installed, `ConfigurationError` where
        `EVENTSQL_POSTGRES` names no programs, `EmbeddedServerError` when the server cannot be started.
        """
        deadline = time.monotonic() + timeout
        running = self.status()
        if running is not None:
            return running
        programs = find_programs()
        with os_errors(f"the embedded server of {self.directory} could not be started"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked(deadline):
                return self._start_locked(programs, deadline)

    def stop(self, *, timeout: float = 30.0, mode: StopMode = "fast") -> bool:
        """Stop the server; return False if it was not running.

        `fast` ends the clients' sessions, `smart` waits for them to end, `immediate` skips the last checkpoint and
        leaves recovery to the next start. Raises `EmbeddedServerError` when the server still runs after `timeout`
        seconds; the request stands.
        """
        deadline = time.monotonic() + timeout
        if not self.directory.is_dir():
            return False
        with os_errors(f"the embedded server of {self.directory} could not be stopped"), self._locked(deadline):
            return self._stop_locked(deadline, mode)

    def status(self) -> EmbeddedServer | None:
        """Return the server if it runs, serves this directory and answers; a leftover postmaster.pid does not count.

        None also while it starts, recovers or stops. Raises `EmbeddedServerError` when it runs but the files of the
        directory do not let us in.
        """
        with os_errors(f"the embedded server of {self.directory} could not be looked at"):
            postmaster = Postmaster.of(self._data)
            if postmaster is None or not postmaster.ready:
                return None
            server = self._server(postmaster)
            return server if self._answers(server) else None

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database, empty or as a copy of `template`, and return its DSN; starts the server if need be.

        Nobody may be connected to the template meanwhile. Raises `EmbeddedServerError` when the name is taken, the
        template is missing or in use, or the disk is full.
        """
        server = self.start()
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        failed = f"database {name!r} could not be created"
        with database_errors(failed, self._log), _connect(server, _DATABASE) as connection:
            connection.execute(statement)
        return server.dsn_for(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and end the sessions in it; one that does not exist is no error.

        Starts the server if need be. Raises `EmbeddedServerError` for `eventsql`, the server's own database.
        """
        if name == _DATABASE:
            raise EmbeddedServerError(f"database {name!r} belongs to the embedded server: drop its schema instead")
        server = self.start()
        failed = f"database {name!r} could not be dropped"
        with database_errors(failed, self._log), _connect(server, _DATABASE) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def destroy(self, *, timeout: float = 30.0) -> None:
        """Stop the server at once and remove the directory with all data, wherever the data lies."""
        deadline = time.monotonic() + timeout
        if not self.directory.is_dir():
            return
        with os_errors(f"the embedded server of {self.directory} could not be removed"), self._locked(deadline):
            self._stop_locked(deadline, "immediate")
            data = self._data
            if is_relocated(data):
                shutil.rmtree(data.parent, ignore_errors=True)
            elif data.exists():
                # Perhaps behind a symlink that somebody set to a larger disk, whose other files are not ours.
                shutil.rmtree(data)
            shutil.rmtree(self.directory)

    # Paths

    @property
    def _link(self) -> Path:
        return self.directory / "data"

    @property
    def _data(self) -> Path:
        """The data directory without symlinks: the server's account may be unable to follow ours."""
        return Path(os.path.realpath(self._link))

    @property
    def _log(self) -> Path:
        return self.directory / "postgres.log"

    # Start

    def _start_locked(self, programs: Path, deadline: float) -> EmbeddedServer:
        # One that starts gets ready; one that stops makes room for a new one.
        while (found := Postmaster.of(self._data)) is not None and not found.ready and time.monotonic() < deadline:
            time.sleep(POLL)
        if found is None:
            account = server_account(self._data)
            programs = reachable_programs(programs, account)
            self._place_data(account)
            for leftover in self._data.parent.glob(".eventsql-initdb-*"):
                # Of a process that was killed; its initdb may still be at work there, and then stays for the next time.
                shutil.rmtree(leftover, ignore_errors=True)
            if not (self._data / "PG_VERSION").exists():
                self._initialise(programs, account, deadline)
            elif not self._password_file.exists():
                self._replace_password(programs, account)
            self._launch(programs, account, deadline)
        server = self._await_ready(deadline)
        self._ensure_database(server)
        return server

    def _place_data(self, account: Account | None) -> None:
        """Make `data` a symlink to a place that the server's account reaches, unless it reaches the directory."""
        link, data = self._link, self._data
        if link.is_symlink():
            if not data.exists():
                _logger.warning("the data of %s is gone from %s; beginning with an empty database", link, data)
                make_public_directory(data.parent)
            return
        if account is None or account.can("-x", self.directory):
            return
        home = new_relocated_home(self.directory)
        _logger.warning(
            "account %s cannot reach %s: the data of the embedded server lies in %s", account.name, self.directory, home
        )
        if link.exists():
            arriving = home / "arriving"
            shutil.copytree(link, arriving, symlinks=True)
            chown_tree(arriving, account)
            arriving.rename(home / "data")
            left = self.directory / "data.moved"
            link.rename(left)
            link.symlink_to(home / "data")
            shutil.rmtree(left)
        else:
            link.symlink_to(home / "data")

    def _initialise(self, programs: Path, account: Account | None, deadline: float) -> None:
        """Run initdb beside the data directory and rename its result, so that a half-made one is never started."""
        version = version_of(programs)
        password = self._keep_password()
        home = self._data.parent
        work = Path(tempfile.mkdtemp(prefix=".eventsql-initdb-", dir=home))
        try:
            new, password_file = work / "data", work / "password"
            password_file.write_text(password)
            new.mkdir(mode=0o700)
            if account is not None:
                chown_tree(work, account)
            outcome = run_program(
                [
                    *(str(programs / "initdb"), "--pgdata", str(new), "--username", _ROLE),
                    *("--pwfile", str(password_file), "--auth", "scram-sha-256"),
                    # Both sort the same on every machine; the C library's other locales do not.
                    *("--encoding", "UTF8", "--locale", "C"),
                    *(_BUILTIN_LOCALE if version >= _BUILTIN_SINCE else ()),
                    # PostgreSQL 18 does so by itself.
                    "--data-checksums",
                    *("--text-search-config", "english", "--no-instructions"),
                ],
                account,
                timeout=deadline - time.monotonic(),
            )
            if outcome.returncode != 0:
                raise failure(f"the embedded server could not initialise {self._data}", outcome.stdout)
            with (new / "postgresql.conf").open("a") as configuration:
                configuration.write("\ninclude 'eventsql.conf'\n")
            if self._data.exists():
                # What an interrupted or foreign hand left there is not a database: without PG_VERSION none starts.
                self._data.rmdir()
            new.rename(self._data)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _launch(self, programs: Path, account: Account | None, deadline: float) -> None:
        data = self._data
        if account is not None and data.stat().st_uid != account.uid:
            chown_tree(data, account)
        remove_misleading_files(data)
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_name("postgres.log.1"))
        ports_tried = 0
        while True:
            port = self._keep_port()
            ports_tried += 1
            write_file(data / "eventsql.conf", configuration(server_settings(memory_bytes(), data, port)), account)
            # The server inherits the open log, which its account might not be able to open.
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                beginning = os.lseek(log, 0, os.SEEK_END)
                seconds = max(1, math.ceil(deadline - time.monotonic()))
                arguments = ["start", "--silent", "--wait", "--timeout", str(seconds), "--pgdata", str(data)]
                outcome = run_program([str(programs / "pg_ctl"), *arguments], account, output=log)
            finally:
                os.close(log)
            if outcome.returncode == 0 or Postmaster.of(data) is not None:
                return
            said = read_from(self._log, beginning)
            if "Address already in use" in said and ports_tried < _PORT_ATTEMPTS:
                (self.directory / "port").unlink(missing_ok=True)
            elif "still in use" in said and time.monotonic() < deadline:
                # The sessions of a killed postmaster notice its death one by one.
                time.sleep(0.1)
            else:
                raise failure(f"the embedded server of {self.directory} did not start", said, self._log)

    def _await_ready(self, deadline: float) -> EmbeddedServer:
        while True:
            postmaster = Postmaster.of(self._data)
            if postmaster is None:
                raise failure(
                    f"the embedded server of {self.directory} ended while it started", read_from(self._log), self._log
                )
            if postmaster.ready:
                return self._server(postmaster)
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"the embedded server of {self.directory} is not ready yet (it recovers, or it stops): "
                    f"start it again to wait longer, or read {self._log}"
                )
            time.sleep(POLL)

    # Stop

    def _stop_locked(self, deadline: float, mode: StopMode) -> bool:
        """Stop by signal, not by pg_ctl: it must work after the package was removed."""
        postmaster = Postmaster.of(self._data)
        if postmaster is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(postmaster.pid, _SIGNALS[mode])
        while Postmaster.of(self._data) is not None:
            if time.monotonic() >= deadline:
                hint = "mode 'immediate' does not wait" if mode == "fast" else "end its sessions, or use mode 'fast'"
                raise EmbeddedServerError(f"the embedded server of {self.directory} has not stopped yet: {hint}")
            time.sleep(POLL)
        return True

    # What is kept: lock, password, port

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        path = self.directory / "lock"
        descriptor = lock_file(path, deadline)
        try:
            yield
        finally:
            # Unlocked before it is closed: a child forked meanwhile holds a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @property
    def _password_file(self) -> Path:
        return self.directory / "password"

    def _password(self) -> str:
        try:
            return self._password_file.read_text().strip()
        except FileNotFoundError:
            raise EmbeddedServerError(
                f"{self._password_file} is missing: stop the embedded server and start it again, "
                "which gives it a new password"
            ) from None

    def _keep_password(self) -> str:
        if not self._password_file.exists():
            write_file(self._password_file, secrets.token_urlsafe(24))
        return self._password()

    def _replace_password(self, programs: Path, account: Account | None) -> None:
        """Set a new password in a stopped server, whose password file was lost."""
        password = secrets.token_urlsafe(24)
        remove_misleading_files(self._data)
        outcome = run_program(
            [str(programs / "postgres"), "--single", "-D", str(self._data), "postgres"],
            account,
            statement=f"ALTER ROLE {_ROLE} PASSWORD '{password}'\n",
        )
        if outcome.returncode != 0:
            said = outcome.stdout.replace(password, "***")
            raise failure(f"the embedded server of {self.directory} did not take a new password", said)
        write_file(self._password_file, password)

    def _keep_port(self) -> int:
        """The port kept from the last start while it is free, else another, which is kept from now on."""
        path = self.directory / "port"
        kept = None
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = int(path.read_text())
        if kept is not None and is_free_port(kept):
            return kept
        port = free_port()
        if kept is not None:
            _logger.warning("port %d is taken: the embedded server of %s moves to %d", kept, self.directory, port)
        write_file(path, f"{port}\n")
        return port

    # Talking to the server

    def _server(self, postmaster: Postmaster) -> EmbeddedServer:
        return EmbeddedServer(self.directory, self._data, postmaster.port, postmaster.pid, self._password())

    def _answers(self, server: EmbeddedServer) -> bool:
        try:
            _connect(server, _DATABASE).close()
        except psycopg.OperationalError as error:
            # A server whose connections are all in use answers, if only to say so.
            return "too many clients" in str(error) or "connection slots are reserved" in str(error)
        return True

    def _ensure_database(self, server: EmbeddedServer) -> None:
        failed = f"database {_DATABASE!r} could not be created"
        with database_errors(failed, self._log), _connect(server, "postgres") as connection:
            if connection.execute("SELECT FROM pg_database WHERE datname = %s", [_DATABASE]).rowcount == 0:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_DATABASE)))


def _connect(server: EmbeddedServer, database: str) -> psycopg.Connection[Any]:
    """Connect to the server and to no other, whatever the PG… variables of this process say."""
    try:
        return psycopg.connect(
            host=HOST,
            hostaddr=HOST,
            port=server.port,
            user=_ROLE,
            password=server.password,
            dbname=database,
            sslmode="disable",
            gssencmode="disable",
            channel_binding="disable",
            # Another program that listens on this port is not told the password.
            require_auth="scram-sha-256",
            options="",
            connect_timeout=5,
            autocommit=True,
        )
    except psycopg.OperationalError as error:
        if "password authentication failed" not in str(error):
            raise
        raise EmbeddedServerError(
            f"the embedded server of {server.directory} refuses the password in its file: stop it, "
            f"remove {server.directory / 'password'} and start it again, which gives it a new password"
        ) from None
