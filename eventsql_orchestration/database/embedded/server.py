"""The embedded server of a directory: initialised, started, asked and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import random
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final, Literal

import psycopg
from psycopg import sql

from eventsql_orchestration.database.embedded.configuration import HOST, configuration, memory_bytes, server_settings
from eventsql_orchestration.database.embedded.postmaster import Postmaster, remove_misleading_files
from eventsql_orchestration.database.embedded.programs import (
    RELOCATION_ROOT,
    Account,
    find_programs,
    public_directory,
    reachable_programs,
    run_program,
    server_account,
    version_of,
)
from eventsql_orchestration.database.embedded.running import DATABASE, ROLE, EmbeddedServer
from eventsql_orchestration.database.translation import has_no_slot
from eventsql_orchestration.errors import ConfigurationError, EmbeddedServerError

logger = logging.getLogger(__name__)

StopMode = Literal["fast", "immediate", "smart"]

_POLL: Final = 0.02
"""Seconds between two looks at a server that starts or stops."""

_PORTS: Final = range(20000, 27000)
"""Below the ports of outgoing connections (from 32768 on Linux, 49152 on macOS): none of them takes the port while the
server is down."""

_LOG_BYTES: Final = 1024 * 1024

_NO_ERROR: Final = re.compile(r"^.* LOG:  .*\n?(?:.* (?:DETAIL|HINT|CONTEXT|STATEMENT):  .*\n?)*", re.MULTILINE)
"""A message of the server's log that is no error, with what belongs to it: the hint at a recovery that was interrupted
speaks of corrupted data."""

_SIGNALS: Final[Mapping[StopMode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class EmbeddedPostgres:
    """The embedded server of a directory. Processes share it: `start` and `stop` take turns through a lock file.

    Under root the server runs as the account `pgserver`. If that account cannot reach the directory (a clone in /root,
    pytest's temporary directories), the data lies in /var/lib/eventsql and `data` is a symlink to it. Remove such a
    directory with `destroy`, which removes both.

    Every `EmbeddedServerError` repeats the last words of the server or of the operating system.
    """

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigurationError` if the directory's name is not UTF-8: the server's configuration contains it."""
        self.directory = directory.absolute()
        try:
            str(self.directory).encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"{str(self.directory)!a} is not UTF-8: choose another directory") from None

    def start(self, *, timeout: float = 60.0) -> EmbeddedServer:
        """Return the running server; initialise and start it first if needed.

        `timeout` (seconds) bounds waiting for other processes, initdb and crash recovery together. A longer recovery
        goes on, and the next call waits for it.

        Raises `MissingExtraError` if the package with the server is not installed, `ConfigurationError` if
        `EVENTSQL_POSTGRES` names no programs, `EmbeddedServerError` if the server cannot be started.
        """
        deadline = time.monotonic() + timeout
        running = self.status()
        if running is not None:
            return running

        programs = find_programs()
        with self._reporting("could not be started"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked(deadline):
                return self._start(programs, deadline)

    def stop(self, *, timeout: float = 30.0, mode: StopMode = "fast") -> bool:
        """Stop the server; return False if it was not running.

        `fast` ends the clients' sessions, `smart` waits for them to end, `immediate` skips the last checkpoint and
        leaves recovery to the next start. Raises `EmbeddedServerError` if the server still runs after `timeout`
        seconds; it stops later.
        """
        deadline = time.monotonic() + timeout
        with self._reporting("could not be stopped"):
            if not self.directory.is_dir():
                return False
            with self._locked(deadline):
                return self._stop(deadline, mode)

    def has_data(self) -> bool:
        """Whether the server was made before. If not, `start` makes it. Raises `EmbeddedServerError` as `status`."""
        with self._reporting("could not be looked at"):
            return (self._data / "PG_VERSION").exists()

    def status(self) -> EmbeddedServer | None:
        """Return the server if it runs, serves this directory and accepts connections.

        None while it starts, recovers or stops. Raises `EmbeddedServerError` if a file cannot be read.
        """
        with self._reporting("could not be looked at"):
            postmaster = Postmaster.of(self._data)
            if postmaster is None or not postmaster.ready:
                return None
            server = self._server(postmaster)
        try:
            server.connect().close()
        except psycopg.OperationalError as error:
            # A server whose connections are all in use answers, if only to say so.
            return server if has_no_slot(str(error)) else None
        return server

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database, empty or as a copy of `template`, and return its DSN; starts the server if needed.

        Raises `EmbeddedServerError` if the name is taken, the template is missing or in use, or the disk is full.
        """
        server = self.start()
        copied = sql.SQL("") if template is None else sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with self._reporting(f"could not create database {name!r}"), server.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}{}").format(sql.Identifier(name), copied))
        return server.dsn_for(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, if it exists, and end its sessions; starts the server if needed.

        Raises `EmbeddedServerError` for `eventsql`, the server's own database.
        """
        with self._reporting(f"could not drop database {name!r}"), self.start().connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def destroy(self, *, timeout: float = 30.0) -> None:
        """Stop the server at once and remove the directory with all data, wherever the data lies."""
        deadline = time.monotonic() + timeout
        if not self.directory.is_dir():
            return
        with self._reporting("could not be removed"), self._locked(deadline):
            self._stop(deadline, "immediate")
            # A symlink of the user's may lead to the data on a larger disk with other files.
            data = self._data
            shutil.rmtree(data, ignore_errors=not data.exists())
            if data.parent.parent == Path(os.path.realpath(RELOCATION_ROOT)):
                data.parent.rmdir()
            shutil.rmtree(self.directory)

    @property
    def _data(self) -> Path:
        """The data directory without symlinks: the server's account may be unable to follow them."""
        return Path(os.path.realpath(self.directory / "data"))

    @property
    def _log(self) -> Path:
        return self.directory / "postgres.log"

    # Errors

    @contextlib.contextmanager
    def _reporting(self, failed: str) -> Iterator[None]:
        """Raise errors of the operating system and the driver as `EmbeddedServerError`, in their own words."""
        try:
            yield
        except (OSError, psycopg.Error) as error:
            raise self._error(failed, str(error)) from error

    def _error(self, failed: str, said: str) -> EmbeddedServerError:
        """The error with the last lines that a program, the server or the driver said, as one line."""
        lines = [line.strip() for line in _NO_ERROR.sub("", said).splitlines() if line.strip()]
        words = " | ".join(lines[-6:]) or "it said nothing"
        log = f" (log: {self._log})" if os.access(self._log, os.R_OK) else ""
        return EmbeddedServerError(f"the embedded server of {self.directory} {failed}: {words}{log}")

    # Start

    def _start(self, programs: Path, deadline: float) -> EmbeddedServer:
        # A server that starts gets ready; a server that stops makes room for a new one.
        while (found := Postmaster.of(self._data)) is not None and not found.ready and time.monotonic() < deadline:
            time.sleep(_POLL)

        if found is None:
            account = server_account(self._data)
            programs = reachable_programs(programs, account)
            self._place_data(account)
            if not self.has_data():
                self._initialise(programs, account, deadline)
            self._launch(programs, account, deadline)

        server = self._await_ready(deadline)
        with server.connect("postgres") as connection:
            known = "SELECT FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) %s"
            if connection.execute(known, [DATABASE]).rowcount == 0:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        return server

    def _place_data(self, account: Account | None) -> None:
        """Make `data` a symlink to a place that the server's account reaches, unless it reaches the directory."""
        link, data = self.directory / "data", self._data
        if link.is_symlink() and not data.exists():
            logger.warning("the data of %s is gone from %s; beginning with an empty database", link, data)
            data.parent.mkdir(parents=True, exist_ok=True)
            data.parent.chmod(0o755)
        if link.is_symlink() or account is None or account.can("-x", self.directory):
            return

        home = public_directory(f"{self.directory.parent.name}-")
        logger.warning("account %s cannot reach %s: its data lies in %s", account.name, self.directory, home)
        moved = self.directory / "data.moved"
        if link.exists():
            shutil.copytree(link, home / "data", symlinks=True)
            account.take(home / "data")
            link.rename(moved)
        link.symlink_to(home / "data")
        shutil.rmtree(moved, ignore_errors=True)

    def _initialise(self, programs: Path, account: Account | None, deadline: float) -> None:
        """Run initdb beside the data directory and rename its result, so that half-made data is never started."""
        version, home = version_of(programs), self._data.parent
        if not (self.directory / "password").exists():
            _write(self.directory / "password", secrets.token_urlsafe(24))

        work = Path(tempfile.mkdtemp(prefix=".eventsql-initdb-", dir=home))
        try:
            new, password_file = work / "data", work / "password"
            shutil.copy(self.directory / "password", password_file)
            if account is not None:
                account.take(work)
            outcome = run_program(
                [
                    *(str(programs / "initdb"), "--pgdata", str(new), "--username", ROLE),
                    *("--pwfile", str(password_file), "--auth", "scram-sha-256"),
                    # Both sort the same on every machine; the C library's other locales do not.
                    *("--encoding", "UTF8", "--locale", "C"),
                    *(("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8") if version >= 17 else ()),
                    # PostgreSQL 18 does so by itself.
                    "--data-checksums",
                    *("--text-search-config", "english", "--no-instructions"),
                ],
                account,
                timeout=deadline - time.monotonic(),
            )
            if outcome.returncode != 0:
                raise self._error("could not be initialised", outcome.stdout)
            # The file is the account's, so a link in its place is not followed.
            with os.fdopen(os.open(new / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "a") as file:
                file.write("\ninclude 'eventsql.conf'\n")
            # This fails if the directory has files: without PG_VERSION they are not a database.
            new.rename(self._data)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _launch(self, programs: Path, account: Account | None, deadline: float) -> None:
        data = self._data
        for leftover in data.parent.glob(".eventsql-initdb-*"):
            # A killed process left it. If its initdb still writes there, the next start removes the rest.
            shutil.rmtree(leftover, ignore_errors=True)
        if account is not None and data.stat().st_uid != account.uid:
            account.take(data)
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_name("postgres.log.1"))

        while True:
            remove_misleading_files(data)
            port = self._port()
            _write(data / "eventsql.conf", configuration(server_settings(memory_bytes(), data, port)), account)
            # The server inherits the open log, which its account might not be able to open.
            with self._log.open("ab+") as log:
                beginning = log.seek(0, os.SEEK_END)
                seconds = str(max(1, math.ceil(deadline - time.monotonic())))
                arguments = ["start", "--silent", "--wait", "--timeout", seconds, "--pgdata", str(data)]
                outcome = run_program([str(programs / "pg_ctl"), *arguments], account, output=log.fileno())
                log.seek(beginning)
                said = log.read().decode(errors="replace")
            if outcome.returncode == 0 or Postmaster.of(data) is not None:
                return
            # Another program may have taken the port. Sessions of a killed postmaster keep its shared memory until they
            # notice its death.
            if time.monotonic() >= deadline or (_is_free(port) and "still in use" not in said):
                raise self._error("did not start", said)
            time.sleep(_POLL)

    def _await_ready(self, deadline: float) -> EmbeddedServer:
        while True:
            postmaster = Postmaster.of(self._data)
            if postmaster is None:
                raise self._error("ended while it started", self._log.read_text(errors="replace"))
            if postmaster.ready:
                return self._server(postmaster)
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"the embedded server of {self.directory} still recovers or stops and is not ready yet: start it "
                    f"again to wait longer, or read {self._log}"
                )
            time.sleep(_POLL)

    # Stop

    def _stop(self, deadline: float, mode: StopMode) -> bool:
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
            time.sleep(_POLL)
        return True

    # Lock, password, port

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """Hold the lock file; the kernel frees it when this process dies."""
        path = self.directory / "lock"
        with contextlib.ExitStack() as stack:
            while not _lock(file := stack.enter_context(path.open("a"))):
                stack.close()
                if time.monotonic() >= deadline:
                    raise EmbeddedServerError(f"another process holds {path} for too long: find it by `fuser {path}`")
                time.sleep(_POLL)
            # Unlocked before it is closed: a child forked meanwhile holds a copy of the descriptor.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            yield

    def _server(self, postmaster: Postmaster) -> EmbeddedServer:
        password = (self.directory / "password").read_text().strip()
        return EmbeddedServer(self._data, postmaster.port, postmaster.pid, password)

    def _port(self) -> int:
        """The port kept from the last start while it is free, else another, which is kept from now on."""
        path = self.directory / "port"
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = int(path.read_text())
            if _is_free(kept):
                return kept
            logger.warning("port %d is taken: the embedded server of %s takes another", kept, self.directory)
        port = next(filter(_is_free, random.sample(_PORTS, len(_PORTS))))
        _write(path, f"{port}\n")
        return port


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PostgreSQL does: connections that linger in TIME_WAIT do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return True
    return False


def _lock(file: IO[str]) -> bool:
    path = Path(file.name)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # A file that was removed meanwhile locks nobody out.
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _write(path: Path, content: str, owner: Account | None = None) -> None:
    """Write a file that only its owner reads (0600); a reader finds all of the old or all of the new content."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    # The server's account may write in the directory of its data: a link that it makes there meanwhile is not followed.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        if owner is not None:
            os.fchown(descriptor, owner.uid, owner.gid)
    new.replace(path)
