"""URLs of databases: parsed, checked, and shown without their secrets.

No error repeats a part of a URL, as errors of libpq and its drivers do.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Any, Final
from urllib.parse import quote

import psycopg
import sqlalchemy
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import URL, make_url

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.redaction import HIDDEN, is_plain, is_plain_host

DIRECT: Final = "direct"
"""The option by which a pooler's URL names the server behind it: `?direct=host:port`."""

_DIRECT_FORM: Final = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,5}))?(?:/(?P<database>[^/@]+))?"
)

_SLASH: Final = re.compile("%2f", re.IGNORECASE)
"""How libpq writes the slashes of a socket's directory in a host."""

_NUMBERS: Final = frozenset(
    {"connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"}
)

_WORDS: Final = {
    "channel_binding": ("disable", "prefer", "require"),
    "gssencmode": ("disable", "prefer", "require"),
    "load_balance_hosts": ("disable", "random"),
    "sslcertmode": ("allow", "disable", "require"),
    "sslmode": ("allow", "disable", "prefer", "require", "verify-ca", "verify-full"),
    "sslnegotiation": ("direct", "postgres"),
    "target_session_attrs": ("any", "prefer-standby", "primary", "read-only", "read-write", "standby"),
}
"""The options that take one of a few words."""

_MOST_PORT: Final = 65_535


def parse_dsn(dsn: str) -> URL:
    """The database URL with psycopg as its driver.

    Raises `ConfigurationError`, without any part of the URL in it, for anything but a PostgreSQL URL with options that
    libpq knows.
    """
    # A URL that was read from a file ends with the end of a line.
    dsn = dsn.strip()
    if re.search(r"\s\w[\w+]*://", dsn):
        # The second URL would be a part of the first, and errors would repeat its password.
        raise ConfigurationError("several database URLs are given: give one")
    if "\x00" in dsn or any("\ud800" <= character <= "\udfff" for character in dsn):
        raise ConfigurationError("the database URL is not valid text: it holds NUL or bytes that are not UTF-8")
    try:
        url = make_url(dsn)
    except sqlalchemy.exc.ArgumentError:
        raise ConfigurationError(
            "the database must be named by a URL such as postgresql://user:password@host:5432/database"
        ) from None
    except ValueError:
        raise ConfigurationError(
            "the port of the database URL is not a number; several hosts are named by options, as in "
            "postgresql://user@/database?host=one,two&port=5432,5433"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError("the database must be PostgreSQL: its URL begins with postgresql://")
    _check_server(url, dsn)
    _check_options_have_values(dsn)
    for name, value in url.query.items():
        _check_option(name, value)
    # COPY and Arrow write and read UTF-8. The URL says so, for every program that gets it.
    encoding = {**url.query, "client_encoding": "UTF8"}
    url = _with_password(url.set(drivername="postgresql+psycopg", query=encoding))
    try:
        connect_arguments(url.difference_update_query([DIRECT]))
    except psycopg.ProgrammingError:
        raise ConfigurationError("libpq cannot read the database URL: write % in a host as %25") from None
    return url


def _check_server(url: URL, dsn: str) -> None:
    # Text before a second @ belongs to the password, and libpq would repeat it.
    if "@" in (url.host or ""):
        raise ConfigurationError("the database URL has more than one @: write one in a user or password as %40")
    place = dsn.partition("?")[0].partition("://")[2]
    if "@" in place.partition("/")[2]:
        raise ConfigurationError(
            "the database URL has an @ after a slash: write / and @ in a user or password as %2F and %40, and @ in a "
            "database name as %40"
        )
    if url.port is not None and not 0 < url.port <= _MOST_PORT:
        raise ConfigurationError(f"the database URL has a port that is out of range, 1 to {_MOST_PORT}")
    if any("\x00" in (part or "") for part in (url.username, url.password, url.database, *_texts(url))):
        raise ConfigurationError("the database URL holds a NUL character (%00), which PostgreSQL does not take")


def _check_options_have_values(dsn: str) -> None:
    # SQLAlchemy drops options without a value. The end of a password with @ and ? looks like such an option.
    options = filter(None, dsn.partition("?")[2].split("&"))
    if not all(option.partition("=")[2] for option in options):
        raise ConfigurationError(
            "the database URL has an option without a value after the ?: give it a value; in a password, write & as "
            "%26, ? as %3F and @ as %40"
        )


def _texts(url: URL) -> list[str]:
    return [text for value in url.query.values() for text in ((value,) if isinstance(value, str) else value)]


def _check_option(name: str, value: str | tuple[str, ...]) -> None:
    known = {each.keyword.decode() for each in pq.Conninfo.get_defaults()}
    if name not in known | {DIRECT}:
        # The name is not repeated: a password with & or ? in it is cut up into options.
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        meant = f": is {near[0]} meant?" if near else "; in a password, write & as %26 and ? as %3F"
        raise ConfigurationError(f"the database URL has an option that libpq does not know{meant}")
    option = f"the option {name} of the database URL"
    if not isinstance(value, str):
        several = ", with commas between its values" if name in ("host", "port") else ""
        raise ConfigurationError(f"{option} is given more than once: give it once{several}")
    if name in _NUMBERS and re.fullmatch(r"\s*-?\d{1,10}\s*", value, re.ASCII) is None:
        raise ConfigurationError(f"{option} must be a whole number")
    if name == "port" and re.fullmatch(r"(\d{1,5})?(,(\d{1,5})?)*", value, re.ASCII) is None:
        raise ConfigurationError(f"{option} must be a port, or one for each host with commas between them")
    if name in _WORDS and value not in _WORDS[name]:
        raise ConfigurationError(f"{option} must be one of {', '.join(_WORDS[name])}")
    if name == "host" and "@" in value.lstrip("@"):
        raise ConfigurationError(f"{option} holds an @: name a host, and user and password before it")


def _with_password(url: URL) -> URL:
    """Move the option `password` to the password's own place, which SQLAlchemy hides when it shows a URL."""
    password = url.query.get("password")
    if not isinstance(password, str):
        return url
    # Without a user, SQLAlchemy would leave the password out of the URL's text.
    return url.set(
        username=url.username or "",
        password=password,
        query={name: each for name, each in url.query.items() if name != "password"},
    )


def with_password_of_environment(dsn: str) -> str:
    """A URL with the password that libpq would take from this process's PGPASSWORD, for processes elsewhere."""
    url, password = parse_dsn(dsn), os.environ.get("PGPASSWORD")
    # libpq prefers the password of a service's file.
    if password and url.password is None and "service" not in url.query:
        url = url.set(username=url.username or "", password=password)
    return render(url)


def split_direct(url: URL) -> tuple[URL, URL]:
    """A database's URL without the option `direct`, and the URL that leads past a pooler (the same without the option).

    The option names `host`, `host:port` or `host:port/database`. Raises `ConfigurationError` for anything else.
    """
    direct = url.query.get(DIRECT)
    if direct is None:
        return url, url
    pooled = url.difference_update_query([DIRECT])
    found = _DIRECT_FORM.fullmatch(direct) if isinstance(direct, str) else None
    if found is None or int(found["port"] or 5432) not in range(1, _MOST_PORT + 1):
        raise ConfigurationError(
            f"the option {DIRECT} of the database URL names the server behind a pooler as host:port or "
            "host:port/database; user and password come from the URL"
        )
    past = pooled.difference_update_query(["host", "hostaddr", "port"])
    return pooled, past.set(
        host=found["host"].strip("[]").replace("%", "%25"),
        port=int(found["port"] or 5432),
        database=found["database"] or pooled.database,
    )


def render(url: URL) -> str:
    """The URL with its password, as libpq reads it."""
    # SQLAlchemy writes a space as it is, which libpq refuses, or as a plus in options, which libpq reads as a plus.
    place, asked, options = url.set(drivername="postgresql").render_as_string(hide_password=False).partition("?")
    return (place + asked + options.replace("+", "%20")).replace(" ", "%20")


def label(url: URL) -> str:
    """A URL without its password and options, for people."""
    user, host, database = url.username, url.host, url.database
    place = url.set(
        drivername="postgresql",
        username=user if is_plain(user or "") else HIDDEN,
        host=host if is_plain_host(_SLASH.sub("/", host or "")) else HIDDEN,
        database=database if is_plain(database or "") else HIDDEN,
    )
    shown = place.difference_update_query(place.query).render_as_string(hide_password=True)
    return shown.replace(quote(HIDDEN, safe=""), HIDDEN)


def connect_arguments(url: URL) -> dict[str, Any]:
    """The arguments of `psycopg.connect` for a URL, as libpq reads it: SQLAlchemy reads hosts and ports otherwise."""
    return conninfo_to_dict(render(url))


def each_server(url: URL) -> list[dict[str, Any]]:
    """The arguments of `psycopg.connect` for each server that a URL names, whatever `target_session_attrs` it has."""
    arguments = {name: each for name, each in connect_arguments(url).items() if name != "target_session_attrs"}
    lists = {name: str(arguments[name]).split(",") for name in ("host", "hostaddr", "port") if name in arguments}
    servers = max(map(len, lists.values()), default=1)
    return [
        arguments | {name: values[number if len(values) > 1 else 0] for name, values in lists.items()}
        for number in range(servers)
    ]
